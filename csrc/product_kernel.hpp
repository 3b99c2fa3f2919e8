// Products of float32 matrices whose columns lie in vector lanes, for attention_kernel.hpp, which includes this inside its
// namespace, behind vectors.hpp. Each tile of the result is kept in registers, of the size that the instruction set has
// room for. Knows nothing about attention.

constexpr int kTileHeight = DEEPINFER_TILE_ROWS;
constexpr int kTileVectors = DEEPINFER_TILE_VECTORS;

struct Matrix {
    const float* data;
    std::int64_t stride;
};

// c[rows, vectors * kLanes] = or += a[rows, depth] b[depth, vectors * kLanes], all of c in registers.
template <int kRows, int kVectors, bool kAdd>
void multiply_tile(Matrix a, Matrix b, float* c, std::int64_t c_stride, std::int64_t depth) {
    Vec acc[kRows][kVectors];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int col = 0; col < kVectors; ++col)
            acc[row][col] = kAdd ? load(c + row * c_stride + col * kLanes) : Vec{};
    for (std::int64_t at = 0; at < depth; ++at) {
        Vec line[kVectors];
#pragma GCC unroll 4
        for (int col = 0; col < kVectors; ++col) line[col] = load(b.data + at * b.stride + col * kLanes);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            const Vec factor = splat(a.data[row * a.stride + at]);
#pragma GCC unroll 4
            for (int col = 0; col < kVectors; ++col) acc[row][col] += factor * line[col];
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int col = 0; col < kVectors; ++col) store(c + row * c_stride + col * kLanes, acc[row][col]);
}

template <int kRows, int kVectors, bool kAdd>
void multiply_last_rows(std::int64_t rows, Matrix a, Matrix b, float* c, std::int64_t c_stride, std::int64_t depth) {
    if (rows == kRows) return multiply_tile<kRows, kVectors, kAdd>(a, b, c, c_stride, depth);
    if constexpr (kRows > 1) multiply_last_rows<kRows - 1, kVectors, kAdd>(rows, a, b, c, c_stride, depth);
}

template <int kVectors, bool kAdd>
void multiply_panel(std::int64_t rows, Matrix a, Matrix b, float* c, std::int64_t c_stride, std::int64_t depth) {
    for (; rows >= kTileHeight; rows -= kTileHeight) {
        multiply_tile<kTileHeight, kVectors, kAdd>(a, b, c, c_stride, depth);
        a.data += kTileHeight * a.stride;
        c += kTileHeight * c_stride;
    }
    multiply_last_rows<kTileHeight - 1, kVectors, kAdd>(rows, a, b, c, c_stride, depth);
}

// The columns right of the last full panel.
template <int kVectors, bool kAdd>
void multiply_last_columns(std::int64_t vectors, std::int64_t rows, Matrix a, Matrix b, float* c, std::int64_t c_stride,
                           std::int64_t depth) {
    if (vectors == kVectors) return multiply_panel<kVectors, kAdd>(rows, a, b, c, c_stride, depth);
    if constexpr (kVectors > 1)
        multiply_last_columns<kVectors - 1, kAdd>(vectors, rows, a, b, c, c_stride, depth);
}

// c[rows, columns] = or += a[rows, depth] b[depth, columns]; columns is a multiple of kLanes.
template <bool kAdd>
void multiply(std::int64_t rows, std::int64_t columns, std::int64_t depth, Matrix a, Matrix b, float* c,
              std::int64_t c_stride) {
    std::int64_t vectors = columns / kLanes;
    for (; vectors >= kTileVectors; vectors -= kTileVectors) {
        multiply_panel<kTileVectors, kAdd>(rows, a, b, c, c_stride, depth);
        b.data += kTileVectors * kLanes;
        c += kTileVectors * kLanes;
    }
    multiply_last_columns<kTileVectors - 1, kAdd>(vectors, rows, a, b, c, c_stride, depth);
}
