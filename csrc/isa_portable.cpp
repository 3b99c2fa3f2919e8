// The kernels for any processor: 128-bit vectors, which every 64-bit one has.
#define DEEPINFER_ISA portable
#define DEEPINFER_LANES 4
#if defined(__aarch64__)
#define DEEPINFER_TILE_ROWS 6  // 24 of 32 registers
#else
#define DEEPINFER_TILE_ROWS 2  // 8 of 16 registers
#endif
#define DEEPINFER_DOT_ROWS 3  // by 4 columns
#define DEEPINFER_TILE_VECTORS 4

#include "attention_kernel.hpp"

namespace deepinfer::attention {
const Kernel kPortable = {"portable", portable::store_span, portable::attend, portable::merge,
                          portable::finish, portable::linear, portable::normalize};
}
