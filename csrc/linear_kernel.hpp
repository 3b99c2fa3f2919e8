// The linear layer in terms of vectors.hpp: dot products along the depth, weights read once and where they lie.
//
// With few rows a layer costs what reading its weights costs; a product that first rearranges them, as libraries do for
// many rows, reads and writes them once more. A job keeps four rows of weights in the first-level cache and passes all
// rows of x over them. Included like attention_kernel.hpp, whose DEEPINFER_DOT_ROWS says how many rows of x fit.

constexpr int kDotRows = DEEPINFER_DOT_ROWS;
constexpr int kDotColumns = 4;

// How far ahead of its use a weight is asked for, in floats: a row or so, further than the processor looks by itself.
constexpr std::int64_t kDotAhead = 512;

// The sums over the lanes of each vector, count <= kLanes.
template <int kCount>
DEEPINFER_INLINE Vec sums_of(const Vec (&vectors)[kCount], int first) {
    Vec square[kLanes];
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row) square[row] = first + row < kCount ? vectors[first + row] : Vec{};
    return sums_of(square);
}

// acc += x[kRows, count] weight[kColumns, count]^T, lane by lane; rows of x are `depth` apart, the weight's `stride`.
// No lambdas here or elsewhere in the kernels: their bodies would be compiled for the least instruction set.
template <int kRows, int kColumns>
DEEPINFER_INLINE void dot_step(const float* x, std::int64_t depth, const float* weight, std::int64_t stride,
                               std::int64_t count, Vec (&acc)[kRows * kColumns]) {
    Vec line[kColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
        __builtin_prefetch(weight + c * stride + kDotAhead);
        line[c] = load_some(weight + c * stride, count);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        const Vec factor = load_some(x + r * depth, count);
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) acc[r * kColumns + c] += factor * line[c];
    }
}

// Columns column, column + step, .. of rows row .. row + kRows.
template <int kRows, int kColumns>
void dot_tile(const LinearProblem& p, std::int64_t row, std::int64_t column, std::int64_t step) {
    constexpr int kCount = kRows * kColumns;
    const float* x = p.x + row * p.depth;
    const float* weight = p.weight + column * p.depth;
    Vec acc[kCount] = {};
    const std::int64_t whole = p.depth / kLanes * kLanes, stride = step * p.depth;
    for (std::int64_t at = 0; at < whole; at += kLanes)
        dot_step<kRows, kColumns>(x + at, p.depth, weight + at, stride, kLanes, acc);
    if (whole < p.depth)
        dot_step<kRows, kColumns>(x + whole, p.depth, weight + whole, stride, p.depth - whole, acc);
    float sums[(kCount + kLanes - 1) / kLanes * kLanes];
#pragma GCC unroll 8
    for (int first = 0; first < kCount; first += kLanes) store(sums + first, sums_of(acc, first));
    for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < kColumns; ++c) {
            const std::int64_t to = column + c * step;
            p.out[(row + r) * p.columns + to] = sums[r * kColumns + c] + (p.bias != nullptr ? p.bias[to] : 0.0f);
        }
}

template <int kRows, int kColumns>
void dot_rows(const LinearProblem& p, std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t step) {
    if (rows == kRows) return dot_tile<kRows, kColumns>(p, row, column, step);
    if constexpr (kRows > 1) dot_rows<kRows - 1, kColumns>(p, row, rows, column, step);
}

// Rows of x in passes of nearly equal size over the same columns.
template <int kColumns>
void dot_columns(const LinearProblem& p, std::int64_t column, std::int64_t step) {
    const std::int64_t passes = (p.rows + kDotRows - 1) / kDotRows;
    for (std::int64_t pass = 0; pass < passes; ++pass) {
        const std::int64_t row = p.rows * pass / passes;
        dot_rows<kDotRows, kColumns>(p, row, p.rows * (pass + 1) / passes - row, column, step);
    }
}

// Memory gives more when it is read in several places at once: the columns of a tile lie a part of the job apart, and
// each of the parts is read from its beginning to its end.
void linear(const LinearProblem& p, std::int64_t column, std::int64_t end) {
    const std::int64_t step = (end - column) / kDotColumns, parts = column + step;
    for (; column < parts; ++column) dot_columns<kDotColumns>(p, column, step);
    for (column += step * (kDotColumns - 1); column < end; ++column) dot_columns<1>(p, column, 1);
}
