// A linear layer over few rows, as the kernels (linear_kernel.hpp) and the Python module share it.
#pragma once

#include <cstdint>

namespace deepinfer {

// Outputs of one job: enough work to hand out, few enough that every thread gets some of a small layer.
constexpr std::int64_t kLinearColumns = 32;

// out[rows, columns] = x[rows, depth] weight[columns, depth]^T + bias, all float32 and dense.
struct LinearProblem {
    const float* x;
    const float* weight;
    const float* bias;  // [columns] or null
    float* out;
    std::int64_t rows, columns, depth;
};

}  // namespace deepinfer
