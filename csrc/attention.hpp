// Attention of one step over paged keys and values: what the planner (attention_plan.hpp), the kernels
// (attention_kernel.hpp, once for each instruction set) and the Python module share.
//
// Plain data only: the kernel files are compiled for instructions that not every processor has, so no function that
// another file might use in its place may be defined here.
#pragma once

#include <cstdint>

#include "linear.hpp"
#include "norm.hpp"

namespace deepinfer::attention {

// Tokens of a block, also the keys of one kernel tile: scores of a tile stay in the second-level cache.
constexpr std::int64_t kBlock = 128;

// Query rows (tokens times heads of a group) of one tile. More rows share a transposed block of keys, but compute more
// of the triangle that the causal mask hides.
constexpr std::int64_t kTileRows = 192;

// Floats of the widest vector: rows of scratch memory are padded to it.
constexpr std::int64_t kWidest = 16;

enum class Element { kFloat32, kBfloat16 };

// One projection of T tokens, [T, heads, dim]; strides in elements, the last dimension is dense.
struct Rows {
    const void* data;
    std::int64_t token_stride;
    std::int64_t head_stride;
};

// One layer's keys or values, [num_blocks, kBlock, kv_heads, dim], dense within a block.
struct Pages {
    void* data;
    std::int64_t block_stride;
};

// Spans of consecutive tokens: span i owns rows starts[i] .. starts[i + 1], the last of its contexts[i] tokens, whose
// keys and values lie in blocks[table_starts[i] ..].
struct Problem {
    Element element;
    Rows q, k, v;
    void* out;  // [tokens, heads, v_dim], dense
    Pages k_pages, v_pages;
    std::int64_t tokens, heads, kv_heads, k_dim, v_dim, num_blocks;
    std::int64_t spans;
    const std::int64_t* starts;
    const std::int64_t* contexts;
    const std::int64_t* table_starts;
    const std::int32_t* blocks;
    float scaling;
    float softcap;        // 0: none
    std::int64_t window;  // 0: none; else a token sees itself and the window - 1 tokens before it
    const float* sinks;   // [heads] or null
};

// Tokens first .. first + count of a span, for the query heads that share one key head, over some blocks.
struct Tile {
    std::int64_t span, kv_head;
    std::int64_t first, count;
    std::int64_t low_block, high_block;
};

// Softmax in progress of the rows (token-major, then head) of a tile: weighted sum, running maximum, running total.
struct State {
    float* sum;      // [rows, v_dim padded to kWidest]
    float* maximum;  // [rows]
    float* total;    // [rows]
};

struct Scratch {
    float* q;       // [rows, k_dim]
    float* keys;    // [k_dim, kBlock]
    float* values;  // [kBlock, v_dim padded]
    float* scores;  // [rows, kBlock]
};

// The same code compiled for one instruction set.
struct Kernel {
    const char* name;
    void (*store)(const Problem&, std::int64_t span, std::int64_t first, std::int64_t count);
    void (*attend)(const Problem&, const Tile&, const Scratch&, const State&);
    void (*merge)(const State& into, const State& other, std::int64_t rows, std::int64_t v_dim);
    void (*finish)(const Problem&, const Tile&, const State&);
    void (*linear)(const LinearProblem&, std::int64_t column, std::int64_t end);
    void (*normalize)(const NormProblem&, std::int64_t row, std::int64_t end);
};

extern const Kernel kPortable;
#if defined(__x86_64__)
extern const Kernel kAvx2;
extern const Kernel kAvx512;
#endif

}  // namespace deepinfer::attention
