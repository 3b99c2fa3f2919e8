// Root-mean-square normalisation in terms of vectors.hpp; included like linear_kernel.hpp.

// Two sums at once, so that the next one need not wait for the last.
DEEPINFER_INLINE float sum_of_squares(const float* x, std::int64_t size) {
    Vec even = {}, odd = {};
    std::int64_t at = 0;
    for (; at + 2 * kLanes <= size; at += 2 * kLanes) {
        const Vec first = load(x + at), second = load(x + at + kLanes);
        even += first * first;
        odd += second * second;
    }
    for (; at < size; at += kLanes) {
        const Vec rest = load_some(x + at, size - at);
        even += rest * rest;
    }
    return sum_of(even + odd);
}

void normalize(const NormProblem& p, std::int64_t row, std::int64_t end) {
    for (; row < end; ++row) {
        const float* x = p.x + row * p.size;
        float* out = p.out + row * p.size;
        const float mean = sum_of_squares(x, p.size) / static_cast<float>(p.size);
        const Vec factor = splat(1.0f / __builtin_sqrtf(mean + p.epsilon));
        for (std::int64_t at = 0; at < p.size; at += kLanes) {
            const std::int64_t count = p.size - at;
            store_some(out + at, load_some(x + at, count) * factor * load_some(p.weight + at, count), count);
        }
    }
}
