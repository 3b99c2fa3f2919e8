// Vectors of kLanes floats by the compiler's vector extension, so that one source serves every instruction set.
//
// Included by attention_kernel.hpp inside the namespace of an instruction set, after DEEPINFER_LANES is defined; all is
// inline and private to the including file.

constexpr int kLanes = DEEPINFER_LANES;

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef std::int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef std::uint32_t BitVec __attribute__((vector_size(kLanes * 4)));
typedef std::uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));

#define DEEPINFER_INLINE inline __attribute__((always_inline))

struct Bfloat16 {
    std::uint16_t bits;
};

// ---- memory ----

// Not `Vec{} + x`: only a difference with +0 is x for every x, so only this costs no instruction.
DEEPINFER_INLINE Vec splat(float x) { return x - Vec{}; }

DEEPINFER_INLINE Vec load(const float* from) {
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

DEEPINFER_INLINE Vec load(const Bfloat16* from) {
    HalfVec half;
    std::memcpy(&half, from, sizeof half);
    return (Vec)(__builtin_convertvector(half, BitVec) << 16);
}

DEEPINFER_INLINE void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

// Rounds to nearest, ties to even; a NaN stays one (adding to its bits could carry into the sign).
DEEPINFER_INLINE void store(Bfloat16* to, Vec v) {
    const BitVec bits = (BitVec)v;
    const BitVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const BitVec quiet = (bits >> 16) | 0x40u;
    const HalfVec half = __builtin_convertvector((BitVec)(v == v ? rounded : quiet), HalfVec);
    std::memcpy(to, &half, sizeof half);
}

// The first `count` elements, zeros behind them; never touches memory beyond.
template <typename T>
DEEPINFER_INLINE Vec load_some(const T* from, std::int64_t count) {
    if (count >= kLanes) return load(from);
    T part[kLanes] = {};
    std::memcpy(part, from, static_cast<std::size_t>(count) * sizeof(T));
    return load(part);
}

template <typename T>
DEEPINFER_INLINE void store_some(T* to, Vec v, std::int64_t count) {
    if (count >= kLanes) return store(to, v);
    T part[kLanes];
    store(part, v);
    std::memcpy(to, part, static_cast<std::size_t>(count) * sizeof(T));
}

// ---- lanes ----

DEEPINFER_INLINE IntVec lane_numbers() {
    IntVec v;
    for (int lane = 0; lane < kLanes; ++lane) v[lane] = lane;
    return v;
}

DEEPINFER_INLINE float sum_of(Vec v) {
    float part[kLanes];
    store(part, v);
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) part[lane] += part[lane + half];
    return part[0];
}

// The lower halves of a and b (or the upper ones) with their lanes alternating.
#if DEEPINFER_LANES == 16
DEEPINFER_INLINE Vec zip_low(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
DEEPINFER_INLINE Vec zip_high(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#elif DEEPINFER_LANES == 8
DEEPINFER_INLINE Vec zip_low(Vec a, Vec b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
DEEPINFER_INLINE Vec zip_high(Vec a, Vec b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#else
DEEPINFER_INLINE Vec zip_low(Vec a, Vec b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
DEEPINFER_INLINE Vec zip_high(Vec a, Vec b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
#endif

// Rows to columns: each pass of perfect shuffles moves one bit of the row number into the lane number.
DEEPINFER_INLINE void transpose(Vec (&rows)[kLanes]) {
#pragma GCC unroll 4
    for (int pass = 1; pass < kLanes; pass *= 2) {
        Vec next[kLanes];
#pragma GCC unroll 8
        for (int row = 0; row < kLanes / 2; ++row) {
            next[2 * row] = zip_low(rows[row], rows[row + kLanes / 2]);
            next[2 * row + 1] = zip_high(rows[row], rows[row + kLanes / 2]);
        }
#pragma GCC unroll 16
        for (int row = 0; row < kLanes; ++row) rows[row] = next[row];
    }
}

// The sum of the lanes of each of these vectors.
DEEPINFER_INLINE Vec sums_of(Vec (&rows)[kLanes]) {
    transpose(rows);
#pragma GCC unroll 4
    for (int half = kLanes / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int row = 0; row < half; ++row) rows[row] += rows[row + half];
    return rows[0];
}

// Likewise the greatest.
DEEPINFER_INLINE Vec maxima_of(Vec (&rows)[kLanes]) {
    transpose(rows);
#pragma GCC unroll 4
    for (int half = kLanes / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int row = 0; row < half; ++row) rows[row] = rows[row] > rows[row + half] ? rows[row] : rows[row + half];
    return rows[0];
}

// ---- functions ----

// e^x for x <= 88, within 2 units in the last place; 0 where the result would not be a normal number; NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor series, whose first left-out term is below 1.3e-7. Adding
// 1.5 * 2^23 + 127 rounds to an integer, and n + 127 then stands in the lowest bits: moved up it is the exponent of 2^n.
// A product, not a sum of bits: whatever bits a NaN leaves there, the result is one.
DEEPINFER_INLINE Vec exponential(Vec x) {
    const Vec shifted = x * 1.44269504f + 12583039.0f;
    const Vec n = shifted - 12583039.0f;
    const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Vec p = r * (1.0f / 720) + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Vec scaled = p * (Vec)((BitVec)shifted << 23);
    return x < -87.0f ? splat(0.0f) : scaled;
}

// 1 - 2 / (e^2x + 1); beyond 10 it is 1 in float32, and e^2x stays finite.
DEEPINFER_INLINE Vec hyperbolic_tangent(Vec x) {
    x = x > 10.0f ? splat(10.0f) : x;
    x = x < -10.0f ? splat(-10.0f) : x;
    return 1.0f - 2.0f / (exponential(x + x) + 1.0f);
}
