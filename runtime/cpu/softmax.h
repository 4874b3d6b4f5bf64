// Softmax and cross entropy over rows of `columns` contiguous elements.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"

namespace sherd::cpu {

// T is double, float, Half or BFloat16 throughout. `x`, `y`, `g` and `gx` are [rows, columns].

template <class T>
void softmax(const T* x, std::int64_t rows, std::int64_t columns, T* y);
/// gx = y * (g - sum of g * y over the row).
template <class T>
void softmax_backward(const T* y, const T* g, std::int64_t rows, std::int64_t columns, T* gx);

template <class T>
void log_softmax(const T* x, std::int64_t rows, std::int64_t columns, T* y);
/// gx = g - e^y * (sum of g over the row).
template <class T>
void log_softmax_backward(const T* y, const T* g, std::int64_t rows, std::int64_t columns, T* gx);

/// loss[r] = log of the sum of e^x[r] - x[r, targets[r]], and 0 where the target is `ignore_index`; tops[r]
/// is the largest of x[r], logs[r] the log of the sum of e^(x[r] - tops[r]). Outputs are [rows]. Returns the
/// first row whose target is outside [0, columns) and not ignored (nothing is written then), or -1.
template <class T>
std::int64_t cross_entropy(const T* x, const std::int64_t* targets, std::int64_t ignore_index,
                           std::int64_t rows, std::int64_t columns, compute_t<T>* loss, compute_t<T>* tops,
                           compute_t<T>* logs);
/// gx[r] = (softmax of x[r] - one-hot of its target) * scale * (row_scale ? row_scale[r] : 1); zeros in
/// ignored rows. `gx` may be `x`.
template <class T>
void cross_entropy_backward(const T* x, const std::int64_t* targets, std::int64_t ignore_index,
                            const compute_t<T>* tops, const compute_t<T>* logs, compute_t<T> scale,
                            const compute_t<T>* row_scale, std::int64_t rows, std::int64_t columns, T* gx);

}  // namespace sherd::cpu
