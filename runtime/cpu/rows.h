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

/// `v` as numbers of type T, which memory would give back.
template <class T, class C>
inline Vec<C> rounded(Vec<C> v) {
  if constexpr (std::is_same_v<T, C>) {
    return v;
  } else {
    T values[lanes<C>];
    store_as<C>(values, v);
    return load_as<C>(values);
  }
}

/// Elements whose terms four chains add up; sums of more are a tree over such blocks, so that an error does
/// not grow with the number of terms.
template <class C>
inline constexpr std::int64_t sum_block = 64 * lanes<C>;

/// Sum of the terms of `blocks` whole blocks from element `first`.
template <class C, class F>
Vec<C> sum_blocks(std::int64_t first, std::int64_t blocks, const F& term) {
  if (blocks > 1) {
    const std::int64_t half = blocks / 2;
    return sum_blocks<C>(first, half, term) + sum_blocks<C>(first + half * sum_block<C>, blocks - half, term);
  }
  constexpr std::int64_t step = lanes<C>;
  constexpr std::integral_constant<std::int64_t, step> whole{};
  Vec<C> chain[4] = {};
  for (std::int64_t j = first; j < first + sum_block<C>; j += 4 * step) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) chain[c] = chain[c] + term(j + c * step, whole);
  }
  return (chain[0] + chain[1]) + (chain[2] + chain[3]);
}

/// Sum of `term(j, count)` over the vectors of a row, always by the same tree. The term's lanes beyond
/// `count` must be zero.
template <class C, class F>
inline C sum_vectors(std::int64_t n, const F& term) {
  constexpr std::int64_t step = lanes<C>;
  constexpr std::integral_constant<std::int64_t, step> whole{};
  std::int64_t j = n / sum_block<C> * sum_block<C>;
  const bool has_blocks = j > 0;
  Vec<C> chain[4] = {};
  for (; j + 4 * step <= n; j += 4 * step) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) chain[c] = chain[c] + term(j + c * step, whole);
  }
  for (int c = 0; j + step <= n; j += step, ++c) chain[c] = chain[c] + term(j, whole);
  Vec<C> all = (chain[0] + chain[1]) + (chain[2] + chain[3]);
  if (j < n) all = all + term(j, n - j);
  if (has_blocks) all = all + sum_blocks<C>(0, n / sum_block<C>, term);
  return sum(all);
}

/// Adds `rows` rows of `width` elements up into the first one, as a tree of pairs.
template <class C>
void add_rows_in_pairs(C* data, std::int64_t rows, std::int64_t width) {
  for (std::int64_t gap = 1; gap < rows; gap *= 2) {
    for (std::int64_t r = 0; r + gap < rows; r += 2 * gap) {
      C *to = data + r * width, *from = to + gap * width;
      for (std::int64_t j = 0; j < width; ++j) to[j] += from[j];
    }
  }
}

/// `count` elements at `from` in the compute type: where they are, or in `room`.
template <class T, class C>
const C* widened(const T* from, std::int64_t count, C* room) {
  if constexpr (std::is_same_v<T, C>) {
    return from;
  } else {
    for_vectors<C>(count, [&](std::int64_t j, auto n) { put<C>(room + j, take<C>(from + j, n), n); });
    return room;
  }
}

}  // namespace sherd::cpu
