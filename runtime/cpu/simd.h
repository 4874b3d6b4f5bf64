// Sixteen floats or eight doubles or integers as one value. The width is fixed, so that a sum over lanes has
// the same bits on every processor; the compiler splits the value where registers are narrower.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "runtime/cpu/lanes.h"
#include "runtime/half.h"
#include "runtime/math.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace sherd::cpu {

template <class T>
struct VecOf {
  using type [[gnu::vector_size(64)]] = T;
};

/// A 64-byte vector of `T`; arithmetic operators and comparisons work lane by lane.
template <class T>
using Vec = typename VecOf<T>::type;
template <class T>
inline constexpr int lanes = 64 / static_cast<int>(sizeof(T));

template <class T>
inline Vec<T> load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
inline void store(T* p, Vec<T> v) {
  std::memcpy(p, &v, sizeof v);
}
#if defined(__AVX512F__)
/// The first `count` elements at `p`, zeros after them; touches nothing beyond.
inline Vec<float> load_part(const float* p, std::int64_t count) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p);
}
inline Vec<double> load_part(const double* p, std::int64_t count) {
  return _mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << count) - 1), p);
}
inline void store_part(float* p, Vec<float> v, std::int64_t count) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), v);
}
inline void store_part(double* p, Vec<double> v, std::int64_t count) {
  _mm512_mask_storeu_pd(p, static_cast<__mmask8>((1u << count) - 1), v);
}
#else
/// The first `count` elements at `p`, zeros after them; reads nothing beyond.
template <class T>
inline Vec<T> load_part(const T* p, std::int64_t count) {
  Vec<T> v{};
  std::memcpy(&v, p, static_cast<std::size_t>(count) * sizeof(T));
  return v;
}
template <class T>
inline void store_part(T* p, Vec<T> v, std::int64_t count) {
  std::memcpy(p, &v, static_cast<std::size_t>(count) * sizeof(T));
}
#endif
template <class T>
inline Vec<T> splat(T x) {
  return Vec<T>{} + x;
}

/// Whether a comparison holds in any lane.
template <class Truths>
inline bool any(Truths truths) {
  return registers::any_of(truths);
}

/// The first `count` lanes of `v` and `fill` in the others.
inline Vec<float> first_lanes(Vec<float> v, std::int64_t count, float fill) {
  using Index = std::int32_t __attribute__((vector_size(64)));
  constexpr Index index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return index < Index{} + static_cast<std::int32_t>(count) ? v : splat(fill);
}

inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
  return fma(Lanes<float>(a), Lanes<float>(b), Lanes<float>(c)).vector();
}
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return fma(Lanes<double>(a), Lanes<double>(b), Lanes<double>(c)).vector();
}

/// The lanes of `v` as doubles, the lower ones first.
inline void widen(Vec<float> v, Vec<double> (&to)[2]) {
  typedef float Eight [[gnu::vector_size(32)]];
  Eight halves[2];
  std::memcpy(halves, &v, sizeof v);
#if defined(__AVX512F__)
  for (int i = 0; i < 2; ++i) to[i] = _mm512_maskz_cvtps_pd(0xff, halves[i]);
#else
  for (int i = 0; i < 2; ++i) to[i] = __builtin_convertvector(halves[i], Vec<double>);
#endif
}

/// lanes<C> elements of another type, converted; `store_as` is the way back. Other loops than those of 16-bit
/// floats stay loops until the compiler makes vectors of them.
template <class C, class T>
inline Vec<C> load_as(const T* p) {
  if constexpr (std::is_same_v<C, T>) {
    return load(p);
  } else if constexpr (is_half_type<T> && std::is_same_v<C, float>) {
    return load_lanes<float>(p).vector();
  } else {
    C values[lanes<C>];
#pragma GCC unroll 1
    for (int l = 0; l < lanes<C>; ++l) values[l] = static_cast<C>(p[l]);
    return load(values);
  }
}
template <class C, class T>
inline void store_as(T* p, Vec<C> v) {
  if constexpr (std::is_same_v<C, T>) {
    store(p, v);
  } else if constexpr (is_half_type<T> && std::is_same_v<C, float>) {
    store_lanes<float>(p, Lanes<float>(v));
  } else {
    C values[lanes<C>];
    store(values, v);
#pragma GCC unroll 1
    for (int l = 0; l < lanes<C>; ++l) p[l] = static_cast<T>(values[l]);
  }
}
/// The first `count` elements, `fill` after them.
template <class C, class T>
inline Vec<C> load_part_as(const T* p, std::int64_t count, C fill) {
  C values[lanes<C>];
  for (int l = 0; l < lanes<C>; ++l) values[l] = fill;
  for (std::int64_t l = 0; l < count; ++l) values[l] = static_cast<C>(p[l]);
  return load(values);
}
template <class C, class T>
inline void store_part_as(T* p, Vec<C> v, std::int64_t count) {
  C values[lanes<C>];
  store(values, v);
  for (std::int64_t l = 0; l < count; ++l) p[l] = static_cast<T>(values[l]);
}

/// Sum of the lanes, always the same tree: halves, quarters, ...
inline float sum(Vec<float> v) {
  using V8 = float __attribute__((vector_size(32)));
  using V4 = float __attribute__((vector_size(16)));
  V8 h[2];
  std::memcpy(h, &v, sizeof v);
  const V8 a = h[0] + h[1];
  V4 q[2];
  std::memcpy(q, &a, sizeof a);
  const V4 b = q[0] + q[1];
  return (b[0] + b[2]) + (b[1] + b[3]);
}
inline double sum(Vec<double> v) {
  using V4 = double __attribute__((vector_size(32)));
  V4 h[2];
  std::memcpy(h, &v, sizeof v);
  const V4 a = h[0] + h[1];
  return (a[0] + a[2]) + (a[1] + a[3]);
}
/// Largest lane; which NaN is passed over depends on the lane.
inline float largest(Vec<float> v) {
  using V8 = float __attribute__((vector_size(32)));
  using V4 = float __attribute__((vector_size(16)));
  V8 h[2];
  std::memcpy(h, &v, sizeof v);
  const V8 a = h[0] > h[1] ? h[0] : h[1];
  V4 q[2];
  std::memcpy(q, &a, sizeof a);
  const V4 b = q[0] > q[1] ? q[0] : q[1];
  const float x = b[0] > b[2] ? b[0] : b[2], y = b[1] > b[3] ? b[1] : b[3];
  return x > y ? x : y;
}
inline double largest(Vec<double> v) {
  double best = v[0];
  for (int l = 1; l < lanes<double>; ++l) best = v[l] > best ? v[l] : best;
  return best;
}

inline std::uint64_t sum(Vec<std::uint64_t> v) {
  std::uint64_t total = 0;
  for (int l = 0; l < lanes<std::uint64_t>; ++l) total += v[l];
  return total;
}

/// Turns sixteen rows into sixteen columns.
inline void transpose(Vec<float> (&rows)[16]) {
  const auto low = [](Vec<float> a, Vec<float> b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  };
  const auto high = [](Vec<float> a, Vec<float> b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  };
  Vec<float> other[16];
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 8; ++i) {
      other[2 * i] = low(rows[i], rows[i + 8]);
      other[2 * i + 1] = high(rows[i], rows[i + 8]);
    }
    for (int i = 0; i < 8; ++i) {
      rows[2 * i] = low(other[i], other[i + 8]);
      rows[2 * i + 1] = high(other[i], other[i + 8]);
    }
  }
}

}  // namespace sherd::cpu
