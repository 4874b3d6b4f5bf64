// Reductions of a strided (outer, reduce, inner) view to a contiguous [outer, inner] result, by a fixed tree.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/forward.h"
#include "runtime/parallel.h"
#include "runtime/tensor.h"

namespace sherd::cpu {

/// What is reduced: sizes and strides in elements. The caller has collapsed its dimensions to these three.
struct StridedReduction {
  std::int64_t outer = 1, reduce = 1, inner = 1;
  std::int64_t outer_stride = 0, reduce_stride = 1, inner_stride = 0;

  /// Of a contiguous tensor with these three sizes.
  static StridedReduction contiguous(std::int64_t outer, std::int64_t reduce, std::int64_t inner) {
    return {outer, reduce, inner, reduce * inner, inner, 1};
  }
};

inline constexpr std::int64_t piece_width = 1024;  // results that one task makes side by side

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Calls `body(part, offset into x, offset into the result)` for pieces of [outer, inner] that are each one
/// run of results.
template <class F>
void for_pieces(const StridedReduction& r, const F& body) {
  const std::int64_t across = ceil_div(r.inner, piece_width);
  const std::int64_t work = r.reduce * std::min(piece_width, r.inner);
  const std::int64_t grain = std::max<std::int64_t>(1, (1 << 15) / std::max<std::int64_t>(work, 1));
  parallel_for(r.outer * across, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      if (across == 1) {
        body(r, t * r.outer_stride, t * r.inner);
        continue;
      }
      const std::int64_t o = t / across, j = t % across * piece_width;
      StridedReduction part = r;
      part.inner = std::min(piece_width, r.inner - j);
      body(part, o * r.outer_stride + j * r.inner_stride, o * r.inner + j);
    }
  });
}

/// A dense tensor as (outer, reduce, inner): the axes of `axes` (bits) side by side, by a copy if need be.
struct Operand {
  Tensor x;
  StridedReduction r;
};
Operand operand(const Tensor& x, Mask axes);

/// What a sum of `T` gives: i64 for integers and bool, else `T`.
template <class T>
using sum_t = std::conditional_t<std::is_integral_v<T>, std::int64_t, T>;

/// Sums times `factor` (1 / reduce for a mean; integers take 1 only). Accumulates in double for double, in
/// i64 for integers, in float otherwise. All dtypes; an empty reduction gives zeros.
template <class T>
void sum(const StridedReduction& r, const T* x, double factor, sum_t<T>* out);

/// Largest (or smallest) element and the index of the first one along the reduced dimension; NaN counts as
/// larger (smaller) than everything. Either output may be null. `reduce` must not be 0. All dtypes.
template <class T>
void maximum(const StridedReduction& r, const T* x, T* out, std::int64_t* index);
template <class T>
void minimum(const StridedReduction& r, const T* x, T* out, std::int64_t* index);

}  // namespace sherd::cpu
