// As much of the CUDA runtime as csrc/page_copy.cu uses, on the CPU: blocks and threads run one after the other, so that
// a kernel whose threads do not wait for each other does what it does on a card. Only for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#define __global__
#define __host__
#define __device__
#define __launch_bounds__(threads)

struct alignas(16) uint4 {
    std::uint32_t x, y, z, w;
};
struct dim3 {
    unsigned x;
};
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
using cudaStream_t = void*;

inline dim3 blockIdx, threadIdx, gridDim;

inline uint4 __ldcs(const uint4* from) { return *from; }
inline void __stcs(uint4* to, uint4 value) { *to = value; }
inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "invalid argument"; }

template <typename... Arguments, std::size_t... I>
void call_kernel(void (*kernel)(Arguments...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<Arguments*>(arguments[I])...);
}

template <typename... Arguments>
cudaError_t cudaLaunchKernel(void (*kernel)(Arguments...), dim3 grid, dim3 block, void** arguments, std::size_t,
                             cudaStream_t) {
    gridDim = grid;
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < block.x; ++threadIdx.x)
            call_kernel(kernel, arguments, std::index_sequence_for<Arguments...>());
    return cudaSuccess;
}
