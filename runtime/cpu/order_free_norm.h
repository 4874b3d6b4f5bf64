// A gradient norm that no order of summation changes, and scaling, over lists of plain values.
#pragma once

#include <cstdint>
#include <span>

#include "runtime/dtype.h"

namespace sherd::cpu {

// T is double, float, Half or BFloat16.

/// Largest absolute value; 0 for none, NaN when there is one.
template <class T>
double max_abs(std::span<const std::span<const T>> list);
/// Adds the squares to `limbs`, as `ExactSquares` has them.
template <class T>
void add_squares(std::span<const std::span<const T>> list, std::int64_t* limbs);

/// x *= factor over a list (the clipping of gradients), in one pass.
template <class T>
void scale(std::span<const std::span<T>> list, double factor);

}  // namespace sherd::cpu
