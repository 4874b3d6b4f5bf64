// Walks a row as vectors of its compute type, so that a row kernel is written once for all dtypes and
// lengths.
#pragma once

#include <cstdint>

#include "runtime/cpu/simd.h"

namespace sherd::cpu {

/// Calls `body(j, count)` for the vectors of [0, n): `count` is an integral constant `lanes<C>` for whole
/// vectors, so that those compile without tests, and the number of elements left for the last one.
template <class C, class F>
inline void for_vectors(std::int64_t n, const F& body) {
  constexpr std::int64_t step = lanes<C>;
  std::int64_t j = 0;
  for (; j + step <= n; j += step) body(j, std::integral_constant<std::int64_t, step>{});
  if (j < n) body(j, n - j);
}

/// `count` elements at `p` as a vector, `fill` in the lanes beyond.
template <class C, class T, class Count>
inline Vec<C> take(const T* p, Count count, C fill = C(0)) {
  if constexpr (std::is_same_v<Count, std::int64_t>) {
    return load_part_as<C>(p, count, fill);
  } else {
    return load_as<C>(p);
  }
}
template <class C, class T, class Count>
inline void put(T* p, Vec<C> v, Count count) {
  if constexpr (std::is_same_v<Count, std::int64_t>) {
    store_part_as<C>(p, v, count);
  } else {
    store_as<C>(p, v);
  }
}

/// Sum of `term(j, count)` over the vectors of a row: four chains and then a tree, so the order is always the
/// same. The term's lanes beyond `count` must be zero.
template <class C, class F>
inline C sum_vectors(std::int64_t n, const F& term) {
  constexpr std::int64_t step = lanes<C>;
  constexpr std::integral_constant<std::int64_t, step> whole{};
  Vec<C> chain[4] = {};
  std::int64_t j = 0;
  for (; j + 4 * step <= n; j += 4 * step) {
    for (int c = 0; c < 4; ++c) chain[c] = chain[c] + term(j + c * step, whole);
  }
  for (int c = 0; j + step <= n; j += step, ++c) chain[c] = chain[c] + term(j, whole);
  Vec<C> all = (chain[0] + chain[1]) + (chain[2] + chain[3]);
  if (j < n) all = all + term(j, n - j);
  return sum(all);
}

}  // namespace sherd::cpu
