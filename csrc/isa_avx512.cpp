// The kernels for x86 processors with 512-bit vectors.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif

#define DEEPINFER_ISA avx512
#define DEEPINFER_LANES 16
#define DEEPINFER_TILE_ROWS 6  // 24 of 32 registers
#define DEEPINFER_DOT_ROWS 6  // by 4 columns
#define DEEPINFER_TILE_VECTORS 4

#include "attention_kernel.hpp"

namespace deepinfer::attention {
const Kernel kAvx512 = {"avx512", avx512::store_span, avx512::attend, avx512::merge,
                        avx512::finish, avx512::linear, avx512::normalize};
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
