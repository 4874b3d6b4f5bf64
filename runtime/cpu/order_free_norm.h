// A gradient norm that no order of summation changes, and scaling, over lists of plain values.
#pragma once

#include <cstdint>
#include <span>

#include "runtime/dtype.h"

namespace sherd::cpu {

/// A stretch of `n` values for the norm; T is double, float, Half or BFloat16.
template <class T>
struct Values {
  const T* data = nullptr;
  std::int64_t n = 0;
};

/// Largest absolute value; 0 for none, NaN when there is one.
template <class T>
double max_abs(std::span<const Values<T>> list);
/// Adds the squares to `limbs`, as `ExactSquares` has them.
template <class T>
void add_squares(std::span<const Values<T>> list, std::int64_t* limbs);

/// x *= factor over a list (the clipping of gradients), in one pass.
template <class T>
struct MutableValues {
  T* data = nullptr;
  std::int64_t n = 0;
};
template <class T>
void scale(std::span<const MutableValues<T>> list, double factor);

}  // namespace sherd::cpu
