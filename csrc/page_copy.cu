// Rows copied by a kernel: between a device's blocks and pinned host memory, in either direction, through addresses that
// both share. For rows that are too small for one copy command each.
//
// Promises: queues one kernel on the given stream and returns; touches only rows that are listed. The caller has checked
// the lists against both memories. Knows nothing about torch or Python.
#include <cuda_runtime.h>

#include <cstdint>

#include "page_copy.hpp"

namespace {

using deepinfer::pages::Tile;
using deepinfer::pages::tile_at;
using deepinfer::pages::tiles_in_row;

constexpr int kThreads = 256;
// Loads that each thread has under way: the bus answers after a microsecond or two, and what is on its way meanwhile
// (16 KiB a block) bounds the bandwidth.
constexpr int kVectors = 4;
constexpr std::int64_t kVectorBytes = sizeof(uint4);
constexpr std::int64_t kTileBytes = kThreads * kVectors * kVectorBytes;

struct Lists {
    char* dst;
    const std::uint32_t* dst_rows;
    const char* src;
    const std::uint32_t* src_rows;
};

__global__ void __launch_bounds__(kThreads) copy_tiles(Lists lists, std::int64_t tiles, std::int64_t row_bytes) {
    for (std::int64_t job = blockIdx.x; job < tiles; job += gridDim.x) {
        const Tile tile = tile_at(job, row_bytes, kTileBytes);
        const auto* from =
            reinterpret_cast<const uint4*>(lists.src + lists.src_rows[tile.index] * row_bytes + tile.offset);
        auto* to = reinterpret_cast<uint4*>(lists.dst + lists.dst_rows[tile.index] * row_bytes + tile.offset);
        const int vectors = static_cast<int>(tile.size / kVectorBytes);
        uint4 held[kVectors];
        // Every byte is used once: streaming accesses leave the caches to the model.
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            const int at = static_cast<int>(threadIdx.x) + k * kThreads;
            if (at < vectors) held[k] = __ldcs(from + at);
        }
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            const int at = static_cast<int>(threadIdx.x) + k * kThreads;
            if (at < vectors) __stcs(to + at, held[k]);
        }
    }
}

bool is_aligned(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % kVectorBytes == 0; }

}  // namespace

// dst[dst_rows[i]] = src[src_rows[i]] for i < rows, on at most `blocks` blocks; the lists lie in device memory.
// Returns a cudaError_t: of the launch, not of the copy.
extern "C" int deepinfer_page_copy_launch(void* dst, const std::uint32_t* dst_rows, const void* src,
                                          const std::uint32_t* src_rows, std::int64_t rows, std::int64_t row_bytes,
                                          int blocks, void* stream) {
    if (rows < 0 || row_bytes < 1 || row_bytes % kVectorBytes != 0 || blocks < 1 || !is_aligned(dst) ||
        !is_aligned(src))
        return cudaErrorInvalidValue;
    const std::int64_t tiles = rows * tiles_in_row(row_bytes, kTileBytes);
    if (tiles == 0) return cudaSuccess;
    const auto grid = static_cast<unsigned>(tiles < blocks ? tiles : blocks);
    Lists lists{static_cast<char*>(dst), dst_rows, static_cast<const char*>(src), src_rows};
    void* arguments[] = {&lists, const_cast<std::int64_t*>(&tiles), &row_bytes};
    return cudaLaunchKernel(copy_tiles, dim3{grid}, dim3{kThreads}, arguments, 0, static_cast<cudaStream_t>(stream));
}

extern "C" const char* deepinfer_page_copy_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
