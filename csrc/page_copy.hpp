// Copying rows of bytes, and their checksum: what the CPU module and the CUDA kernel share.
//
// A copy is cut into tiles, each a part of one row; `tile_at` is the only index arithmetic there is, on both sides.
//
// The checksum of a row: its bytes are little-endian 64-bit words, padded with zeros to whole stripes of 64 words. Word l
// of each stripe goes into lane l by lane = rotl((lane ^ word ^ (word >> 32)) * K, 31), lanes begin as (l + 1) * K; in
// the end the same step takes the lanes in order into a total that begins as the size, and total ^ (total >> 32) is the
// result. Every step is a bijection of the state and of the word, so that a change within one word (any byte, any bits
// of it) always changes the result; others, words that change places among them, do but for a chance of about 2^-64.
// The shift brings a word's high bits, which multiplication would never spread, to where it does. Lanes do not depend on
// each other, so that several multiplications are under way at once. No defence against forgery.
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
