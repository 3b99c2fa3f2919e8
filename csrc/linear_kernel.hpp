// The linear layer in terms of vectors.hpp: dot products along the depth, weights read once and where they lie.
//
// With few rows a layer costs what reading its weights costs; a product that first rearranges them, as libraries do for
// many rows, reads and writes them once more. A job keeps four rows of weights in the first-level cache and passes all
// rows of x over them. Included like attention_kernel.hpp, whose DEEPINFER_DOT_ROWS says how many rows of x fit.

constexpr int kDotRows = DEEPINFER_DOT_ROWS;
constexpr int kDotColumns = 4;

// The sums over the lanes of each vector, count <= kLanes.
template <int kCount>
DEEPINFER_INLINE Vec sums_of(const Vec (&vectors)[kCount], int first) {
    Vec square[kLanes];
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row) square[row] = first + row < kCount ? vectors[first + row] : Vec{};
    transpose(square);
#pragma GCC unroll 4
    for (int half = kLanes / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int row = 0; row < half; ++row) square[row] += square[row + half];
    return square[0];
}

// acc += x[kRows, .. at + count] weight[kColumns, .. at + count]^T, lane by lane. No lambdas here or elsewhere in the
// kernels: their bodies would be compiled for the least instruction set.
template <int kRows, int kColumns>
DEEPINFER_INLINE void dot_step(const float* x, const float* weight, std::int64_t depth, std::int64_t count,
                               Vec (&acc)[kRows * kColumns]) {
    Vec line[kColumns];
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) line[c] = load_some(weight + c * depth, count);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        const Vec factor = load_some(x + r * depth, count);
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) acc[r * kColumns + c] += factor * line[c];
    }
}

template <int kRows, int kColumns>
void dot_tile(const LinearProblem& p, std::int64_t row, std::int64_t column) {
    constexpr int kCount = kRows * kColumns;
    const float* x = p.x + row * p.depth;
    const float* weight = p.weight + column * p.depth;
    Vec acc[kCount] = {};
    const std::int64_t whole = p.depth / kLanes * kLanes;
    for (std::int64_t at = 0; at < whole; at += kLanes)
        dot_step<kRows, kColumns>(x + at, weight + at, p.depth, kLanes, acc);
    if (whole < p.depth) dot_step<kRows, kColumns>(x + whole, weight + whole, p.depth, p.depth - whole, acc);
    float sums[(kCount + kLanes - 1) / kLanes * kLanes];
#pragma GCC unroll 8
    for (int first = 0; first < kCount; first += kLanes) store(sums + first, sums_of(acc, first));
    for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < kColumns; ++c)
            p.out[(row + r) * p.columns + column + c] =
                sums[r * kColumns + c] + (p.bias != nullptr ? p.bias[column + c] : 0.0f);
}

template <int kRows, int kColumns>
void dot_rows(const LinearProblem& p, std::int64_t row, std::int64_t rows, std::int64_t column) {
    if (rows == kRows) return dot_tile<kRows, kColumns>(p, row, column);
    if constexpr (kRows > 1) dot_rows<kRows - 1, kColumns>(p, row, rows, column);
}

// Rows of x in passes of nearly equal size over the same columns.
template <int kColumns>
void dot_columns(const LinearProblem& p, std::int64_t column) {
    const std::int64_t passes = (p.rows + kDotRows - 1) / kDotRows;
    for (std::int64_t pass = 0; pass < passes; ++pass) {
        const std::int64_t row = p.rows * pass / passes;
        dot_rows<kDotRows, kColumns>(p, row, p.rows * (pass + 1) / passes - row, column);
    }
}

void linear(const LinearProblem& p, std::int64_t column, std::int64_t end) {
    for (; column + kDotColumns <= end; column += kDotColumns) dot_columns<kDotColumns>(p, column);
    for (; column < end; ++column) dot_columns<1>(p, column);
}
