// Root-mean-square normalisation of rows, as the kernels (norm_kernel.hpp) and the Python module share it.
#pragma once

#include <cstdint>

namespace deepinfer {

// Rows of one job: some microseconds of work.
constexpr std::int64_t kNormRows = 16;

// out[row] = x[row] / sqrt(mean(x[row]^2) + epsilon) * weight, all float32 and dense.
struct NormProblem {
    const float* x;
    const float* weight;  // [size]
    float* out;
    std::int64_t rows, size;
    float epsilon;
};

}  // namespace deepinfer
