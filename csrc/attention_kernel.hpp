// The attention kernels in terms of vectors.hpp. A file that includes this defines DEEPINFER_ISA (the namespace),
// DEEPINFER_LANES, and the register tile of its instruction set, DEEPINFER_TILE_ROWS x DEEPINFER_TILE_VECTORS.
//
// One path serves decodes and prompts: a block of keys is transposed into scratch memory, so that scores and weighted
// sums are both products row x matrix with the columns in vector lanes; softmax runs along (online), in float32.
// Promises that nothing behind a span's last visible token is read, whatever lies there.
#include <cfloat>
#include <cstring>

#include "attention.hpp"
#include "linear.hpp"
#include "norm.hpp"

namespace deepinfer::attention {
namespace DEEPINFER_ISA {
namespace {

#include "vectors.hpp"
#include "product_kernel.hpp"

DEEPINFER_INLINE std::int64_t padded(std::int64_t count, std::int64_t to) { return (count + to - 1) / to * to; }
DEEPINFER_INLINE std::int64_t lesser(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
DEEPINFER_INLINE std::int64_t greater(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

// ---- a tile's operands ----

// What a tile sees, in tokens of its sequence.
struct View {
    const Problem& problem;
    const Tile& tile;
    std::int64_t group;  // query heads of a key head
    std::int64_t rows;
    std::int64_t position;  // of the tile's first token

    View(const Problem& p, const Tile& t)
        : problem(p),
          tile(t),
          group(p.heads / p.kv_heads),
          rows(t.count * group),
          position(p.contexts[t.span] - (p.starts[t.span + 1] - p.starts[t.span]) + t.first) {}

    std::int64_t token_row(std::int64_t row) const { return problem.starts[tile.span] + tile.first + row / group; }
    std::int64_t head(std::int64_t row) const { return tile.kv_head * group + row % group; }
    std::int64_t end(std::int64_t row) const { return position + row / group + 1; }
    std::int64_t begin(std::int64_t row) const {
        return problem.window == 0 ? 0 : greater(0, end(row) - problem.window);
    }
    std::int64_t block(std::int64_t number) const {
        return problem.blocks[problem.table_starts[tile.span] + number];
    }
};

template <typename T>
const T* block_rows(const View& view, const Pages& pages, std::int64_t number, std::int64_t dim) {
    return static_cast<const T*>(pages.data) + view.block(number) * pages.block_stride + view.tile.kv_head * dim;
}

// q [rows, k_dim] in float32, scaled.
template <typename T>
void pack_queries(const View& view, float* to) {
    const Problem& p = view.problem;
    for (std::int64_t row = 0; row < view.rows; ++row, to += p.k_dim) {
        const T* from = static_cast<const T*>(p.q.data) + view.token_row(row) * p.q.token_stride +
                        view.head(row) * p.q.head_stride;
        for (std::int64_t at = 0; at < p.k_dim; at += kLanes) {
            const std::int64_t count = p.k_dim - at;
            store_some(to + at, load_some(from + at, count) * p.scaling, count);
        }
    }
}

// Keys of a block -> [k_dim, kBlock]; columns behind `count` are zero up to the next multiple of kLanes.
template <typename T>
void pack_keys(const T* from, std::int64_t stride, std::int64_t dim, std::int64_t count, float* to) {
    for (std::int64_t key = 0; key < count; key += kLanes) {
        for (std::int64_t at = 0; at < dim; at += kLanes) {
            Vec square[kLanes];
            if (key + kLanes <= count && at + kLanes <= dim) {
#pragma GCC unroll 16
                for (int row = 0; row < kLanes; ++row) square[row] = load(from + (key + row) * stride + at);
            } else {
                for (int row = 0; row < kLanes; ++row)
                    square[row] = key + row < count ? load_some(from + (key + row) * stride + at, dim - at) : Vec{};
            }
            transpose(square);
            const std::int64_t lines = lesser(kLanes, dim - at);
            for (std::int64_t line = 0; line < lines; ++line) store(to + (at + line) * kBlock + key, square[line]);
        }
    }
}

// Values of a block as a float32 matrix of `columns` columns: in place where they are one, else a copy.
template <typename T>
Matrix values_of(const T* from, std::int64_t stride, std::int64_t dim, std::int64_t columns, std::int64_t count,
                 float* copy) {
    if constexpr (sizeof(T) == sizeof(float)) {
        if (dim == columns) return {from, stride};
    }
    for (std::int64_t key = 0; key < count; ++key)
        for (std::int64_t at = 0; at < columns; at += kLanes)
            store(copy + key * columns + at, load_some(from + key * stride + at, greater(0, dim - at)));
    return {copy, columns};
}

// ---- what comes next ----

// Rows of a block that are needed next. They lie apart, one head among others: the processor's own prefetch does not
// follow, and the arithmetic would wait for memory at the start of each block.
template <typename T>
struct Next {
    const T* from;
    std::int64_t stride, dim, rows;

    DEEPINFER_INLINE void ask(std::int64_t begin, std::int64_t end) const {
        constexpr std::int64_t kLine = 64 / sizeof(T);
        for (std::int64_t row = begin; row < end; ++row)
            for (std::int64_t at = 0; at < dim; at += kLine) __builtin_prefetch(from + row * stride + at);
    }
};

// `multiply`, asking for memory all along: with each tile of the product for no more than arrives meanwhile.
template <bool kAdd, typename T>
void multiply_asking(std::int64_t rows, std::int64_t columns, std::int64_t depth, Matrix a, Matrix b, float* c,
                     std::int64_t c_stride, const Next<T>& next) {
    constexpr std::int64_t kPanel = kTileVectors * kLanes;
    const std::int64_t panels = (columns + kPanel - 1) / kPanel;
    const std::int64_t tiles = (rows + kTileHeight - 1) / kTileHeight * panels;
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
        const std::int64_t row = tile / panels * kTileHeight, column = tile % panels * kPanel;
        next.ask(next.rows * tile / tiles, next.rows * (tile + 1) / tiles);
        multiply<kAdd>(lesser(kTileHeight, rows - row), lesser(kPanel, columns - column), depth,
                       {a.data + row * a.stride, a.stride}, {b.data + column, b.stride}, c + row * c_stride + column,
                       c_stride);
    }
}

// ---- softmax ----

// The lane-wise maximum of a row's scores. Only the columns begin .. end are visible; the others become -infinity.
DEEPINFER_INLINE Vec greatest_of_row(float* scores, std::int64_t columns, std::int64_t begin, std::int64_t end,
                                     float softcap) {
    const bool whole = begin <= 0 && end >= columns;
    const IntVec lanes = lane_numbers();
    Vec best = splat(-FLT_MAX);
    for (std::int64_t at = 0; at < columns; at += kLanes) {
        Vec s = load(scores + at);
        if (softcap != 0) s = softcap * hyperbolic_tangent(s / softcap);
        if (!whole) {
            const IntVec place = lanes + static_cast<std::int32_t>(at);
            const IntVec seen = (place >= static_cast<std::int32_t>(begin)) & (place < static_cast<std::int32_t>(end));
            s = seen ? s : splat(-__builtin_inff());
        }
        if (softcap != 0 || !whole) store(scores + at, s);
        best = s > best ? s : best;
    }
    return best;
}

// Scores of a row -> weights relative to `maximum`; returns their lane-wise sum.
DEEPINFER_INLINE Vec weigh_row(float* scores, std::int64_t columns, float maximum) {
    Vec total = {};
    for (std::int64_t at = 0; at < columns; at += kLanes) {
        const Vec weight = exponential(load(scores + at) - maximum);
        total += weight;
        store(scores + at, weight);
    }
    return total;
}

// Scores of rows first .. first + count, count <= kLanes -> weights relative to each row's new maximum, which goes into
// the state. So many rows at a time: what is done across a vector's lanes is done once for all of them.
void weigh_rows(const View& view, float* scores, std::int64_t first, std::int64_t count, std::int64_t columns,
                std::int64_t token, std::int64_t tokens, const State& state, std::int64_t width) {
    Vec lanes[kLanes];
    for (std::int64_t row = 0; row < kLanes; ++row)
        lanes[row] = row < count ? greatest_of_row(scores + (first + row) * kBlock, columns,
                                                   view.begin(first + row) - token,
                                                   lesser(tokens, view.end(first + row) - token), view.problem.softcap)
                                 : Vec{};
    const Vec found = maxima_of(lanes), before = load_some(state.maximum + first, count);
    const Vec now = found > before ? found : before, shrink = exponential(before - now);
    store_some(state.maximum + first, now, count);
    for (std::int64_t row = 0; row < kLanes; ++row)
        lanes[row] =
            row < count ? weigh_row(scores + (first + row) * kBlock, columns, state.maximum[first + row]) : Vec{};
    store_some(state.total + first, load_some(state.total + first, count) * shrink + sums_of(lanes), count);
    float factors[kLanes];
    store(factors, shrink);
    for (std::int64_t row = 0; row < count; ++row) {
        if (factors[row] == 1.0f) continue;
        float* sum = state.sum + (first + row) * width;
        for (std::int64_t at = 0; at < width; at += kLanes) store(sum + at, load(sum + at) * factors[row]);
    }
}

void clear(const State& state, std::int64_t rows, std::int64_t width) {
    std::memset(state.sum, 0, static_cast<std::size_t>(rows * width) * sizeof(float));
    for (std::int64_t row = 0; row < rows; ++row) {
        state.maximum[row] = -FLT_MAX;
        state.total[row] = 0;
    }
}

template <typename T>
void attend_tile(const Problem& problem, const Tile& tile, const Scratch& scratch, const State& state) {
    const View view(problem, tile);
    const std::int64_t width = padded(problem.v_dim, kWidest);
    const std::int64_t value_columns = padded(problem.v_dim, kLanes);
    const std::int64_t visible = view.end(view.rows - 1);
    clear(state, view.rows, width);
    pack_queries<T>(view, scratch.q);
    const std::int64_t key_stride = problem.kv_heads * problem.k_dim, value_stride = problem.kv_heads * problem.v_dim;
    for (std::int64_t number = tile.low_block; number < tile.high_block; ++number) {
        const std::int64_t first = number * kBlock;
        const std::int64_t count = lesser(kBlock, visible - first), columns = padded(count, kLanes);
        const std::int64_t next_count = number + 1 < tile.high_block ? lesser(kBlock, visible - first - kBlock) : 0;
        const T* keys_at = block_rows<T>(view, problem.k_pages, number, problem.k_dim);
        const T* next_keys = next_count > 0 ? block_rows<T>(view, problem.k_pages, number + 1, problem.k_dim) : keys_at;
        const T* values_at = block_rows<T>(view, problem.v_pages, number, problem.v_dim);
        pack_keys(keys_at, key_stride, problem.k_dim, count, scratch.keys);
        multiply_asking<false>(view.rows, columns, problem.k_dim, {scratch.q, problem.k_dim}, {scratch.keys, kBlock},
                               scratch.scores, kBlock, Next<T>{values_at, value_stride, problem.v_dim, count});
        for (std::int64_t row = 0; row < view.rows; row += kLanes)
            weigh_rows(view, scratch.scores, row, lesser(kLanes, view.rows - row), columns, first, count, state, width);
        const Matrix values = values_of(values_at, value_stride, problem.v_dim, value_columns, count, scratch.values);
        multiply_asking<true>(view.rows, value_columns, count, {scratch.scores, kBlock}, values, state.sum, width,
                              Next<T>{next_keys, key_stride, problem.k_dim, next_count});
    }
}

// ---- results ----

void merge(const State& into, const State& other, std::int64_t rows, std::int64_t v_dim) {
    const std::int64_t width = padded(v_dim, kWidest);
    for (std::int64_t first = 0; first < rows; first += kLanes) {
        const std::int64_t count = lesser(kLanes, rows - first);
        const Vec a = load_some(into.maximum + first, count), b = load_some(other.maximum + first, count);
        const Vec best = a > b ? a : b, keep = exponential(a - best), take = exponential(b - best);
        store_some(into.maximum + first, best, count);
        store_some(into.total + first,
                   load_some(into.total + first, count) * keep + load_some(other.total + first, count) * take, count);
        float keeps[kLanes], takes[kLanes];
        store(keeps, keep);
        store(takes, take);
        for (std::int64_t row = 0; row < count; ++row) {
            float* sum = into.sum + (first + row) * width;
            const float* more = other.sum + (first + row) * width;
            for (std::int64_t at = 0; at < width; at += kLanes)
                store(sum + at, load(sum + at) * keeps[row] + load(more + at) * takes[row]);
        }
    }
}

float exponential_of(float x) { return exponential(splat(x))[0]; }

template <typename T>
void finish_tile(const Problem& problem, const Tile& tile, const State& state) {
    const View view(problem, tile);
    const std::int64_t width = padded(problem.v_dim, kWidest);
    for (std::int64_t row = 0; row < view.rows; ++row) {
        const std::int64_t head = view.head(row);
        float keep = 1, total = state.total[row];
        if (problem.sinks != nullptr) {
            const float sink = problem.sinks[head];
            const float best = sink > state.maximum[row] ? sink : state.maximum[row];
            keep = exponential_of(state.maximum[row] - best);
            total = total * keep + exponential_of(sink - best);
        }
        const Vec factor = splat(keep) / total;
        T* to = static_cast<T*>(problem.out) + (view.token_row(row) * problem.heads + head) * problem.v_dim;
        const float* sum = state.sum + row * width;
        for (std::int64_t at = 0; at < problem.v_dim; at += kLanes)
            store_some(to + at, load(sum + at) * factor, problem.v_dim - at);
    }
}

// ---- keys and values of the step ----

template <typename T>
void copy_token(const Rows& from, std::int64_t token, std::int64_t heads, std::int64_t dim, T* to) {
    const T* row = static_cast<const T*>(from.data) + token * from.token_stride;
    for (std::int64_t head = 0; head < heads; ++head)
        std::memcpy(to + head * dim, row + head * from.head_stride, static_cast<std::size_t>(dim) * sizeof(T));
}

template <typename T>
void store_tokens(const Problem& p, std::int64_t span, std::int64_t first, std::int64_t count) {
    const std::int64_t start = p.starts[span];
    const std::int64_t past = p.contexts[span] - (p.starts[span + 1] - start);
    for (std::int64_t token = first; token < first + count; ++token) {
        const std::int64_t position = past + token;
        const std::int64_t block = p.blocks[p.table_starts[span] + position / kBlock];
        const std::int64_t place = position % kBlock * p.kv_heads;
        T* k = static_cast<T*>(p.k_pages.data) + block * p.k_pages.block_stride + place * p.k_dim;
        T* v = static_cast<T*>(p.v_pages.data) + block * p.v_pages.block_stride + place * p.v_dim;
        copy_token<T>(p.k, start + token, p.kv_heads, p.k_dim, k);
        copy_token<T>(p.v, start + token, p.kv_heads, p.v_dim, v);
    }
}

#include "linear_kernel.hpp"
#include "norm_kernel.hpp"

// ---- by element type ----

void store_span(const Problem& problem, std::int64_t span, std::int64_t first, std::int64_t count) {
    if (problem.element == Element::kFloat32) return store_tokens<float>(problem, span, first, count);
    store_tokens<Bfloat16>(problem, span, first, count);
}

void attend(const Problem& problem, const Tile& tile, const Scratch& scratch, const State& state) {
    if (problem.element == Element::kFloat32) return attend_tile<float>(problem, tile, scratch, state);
    attend_tile<Bfloat16>(problem, tile, scratch, state);
}

void finish(const Problem& problem, const Tile& tile, const State& state) {
    if (problem.element == Element::kFloat32) return finish_tile<float>(problem, tile, state);
    finish_tile<Bfloat16>(problem, tile, state);
}

}  // namespace
}  // namespace DEEPINFER_ISA
}  // namespace deepinfer::attention
