// The kernels for x86 processors with 256-bit vectors with fused multiply-add.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define DEEPINFER_ISA avx2
#define DEEPINFER_LANES 8
#define DEEPINFER_TILE_ROWS 6  // 12 of 16 registers
#define DEEPINFER_DOT_ROWS 3  // by 4 columns
#define DEEPINFER_TILE_VECTORS 2

#include "attention_kernel.hpp"

namespace deepinfer::attention {
const Kernel kAvx2 = {"avx2", avx2::store_span, avx2::attend, avx2::merge,
                      avx2::finish, avx2::linear, avx2::normalize};
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
