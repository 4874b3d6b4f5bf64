// Layer and RMS normalisation over the last dimension: rows of `columns` contiguous elements.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"

namespace sherd::cpu {

/// y = (x - mean) / sqrt(variance + eps) * weight + bias per row, the variance without Bessel's correction.
/// `weight` and `bias` have `columns` elements or are null. `mean` and `rstd` ([rows]) are what backward
/// needs. T is double, float, Half or BFloat16. Without `mean`, rows are taken about 0 (RMS normalisation).
template <class T>
void layer_norm(const T* x, const T* weight, const T* bias, double eps, std::int64_t rows,
                std::int64_t columns, T* y, compute_t<T>* mean, compute_t<T>* rstd);

/// Writes gx [rows, columns], to which it adds `more` unless that is null, and gweight and gbias [columns]
/// where they are not null. Without `mean`, rows were taken about 0.
template <class T>
void layer_norm_backward(const T* gy, const T* x, const T* weight, const compute_t<T>* mean,
                         const compute_t<T>* rstd, const T* more, std::int64_t rows, std::int64_t columns,
                         T* gx, T* gweight, T* gbias);

}  // namespace sherd::cpu
