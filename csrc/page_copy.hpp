// Copying rows of bytes: what the CPU module and the CUDA kernel share.
//
// A copy is cut into tiles, each a part of one row; `tile_at` is the only index arithmetic there is, on both sides.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define DEEPINFER_BOTH __host__ __device__
#else
#define DEEPINFER_BOTH
#endif

namespace deepinfer::pages {

struct Tile {
    std::int64_t index;  // in the lists of rows
    std::int64_t offset;
    std::int64_t size;
};

DEEPINFER_BOTH inline std::int64_t tiles_in_row(std::int64_t row_bytes, std::int64_t tile_bytes) {
    return (row_bytes + tile_bytes - 1) / tile_bytes;
}

DEEPINFER_BOTH inline Tile tile_at(std::int64_t tile, std::int64_t row_bytes, std::int64_t tile_bytes) {
    const std::int64_t in_row = tiles_in_row(row_bytes, tile_bytes);
    const std::int64_t offset = tile % in_row * tile_bytes;
    const std::int64_t left = row_bytes - offset;
    return {tile / in_row, offset, left < tile_bytes ? left : tile_bytes};
}

}  // namespace deepinfer::pages
