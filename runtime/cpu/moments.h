// What all that normalises shares: mean and deviation of a row, and what may be missing beside it.
#pragma once

#include <cmath>

#include "runtime/cpu/rows.h"
#include "runtime/math.h"
#include "runtime/tensor.h"

namespace sherd::cpu {

/// x - mean with zeros in the lanes beyond `count`, so that sums may use it.
template <class C, class T, class Count>
Vec<C> centred(const T* x, Count count, C mean) {
  return take<C>(x, count, mean) - splat(mean);
}

/// `rstd` is 1 / root(variance + eps), the variance without Bessel's correction.
template <class C>
struct Moments {
  C mean, rstd;
};

/// Of `columns` contiguous elements; about 0 if not `about_mean`.
template <class T, class C = compute_t<T>>
Moments<C> moments_of(const T* row, std::int64_t columns, double eps, bool about_mean = true) {
  const C n = static_cast<C>(columns);
  const auto itself = [&](std::int64_t j, auto count) { return take<C>(row + j, count); };
  C m = about_mean ? sum_vectors<C>(columns, itself) / n : C(0);
  const auto squares = [&](std::int64_t j, auto count) {
    const Vec<C> d = centred(row + j, count, m);
    return d * d;
  };
  C variance = sum_vectors<C>(columns, squares) / n;
  if (variance < m * m * static_cast<C>(math::nearly_constant)) {
    m += sum_vectors<C>(columns, [&](std::int64_t j, auto count) { return centred(row + j, count, m); }) / n;
    variance = sum_vectors<C>(columns, squares) / n;
  }
  return {m, C(1) / std::sqrt(variance + static_cast<C>(eps))};
}

}  // namespace sherd::cpu
