// Several numbers as one, for the functors of elementwise ops and the functions of runtime/math.h: a loop
// over them is one of vectors whatever a compiler finds, and a lane has the bits that the number alone would
// have. Each is made of vectors as wide as the processor's registers, for of wider ones compilers make single
// elements.
#pragma once

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "runtime/half.h"
#include "runtime/math_steps.h"
#include "runtime/twofold.h"

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace sherd::cpu {

// `has_vectors`: this file is compiled for a processor whose vectors multiply and add in one step. Else lanes
// have the same bits, but of some functions they are computed one by one.
#if defined(__AVX512F__)
inline constexpr int register_bytes = 64;
inline constexpr bool has_vectors = true;
#elif defined(__FMA__) && defined(__AVX2__)
inline constexpr int register_bytes = 32;
inline constexpr bool has_vectors = true;
#else
inline constexpr int register_bytes = 16;
#if defined(__aarch64__)
inline constexpr bool has_vectors = true;
#else
inline constexpr bool has_vectors = false;
#endif
#endif

namespace registers {

template <class T, int bytes>
struct VectorOf {
  typedef T type [[gnu::vector_size(bytes)]];
};

/// `count` numbers in registers.
template <class T, int count>
struct Registers {
  static constexpr int bytes = std::min(register_bytes, count* static_cast<int>(sizeof(T)));
  static constexpr int parts = count * static_cast<int>(sizeof(T)) / bytes;
  using Part = typename VectorOf<T, bytes>::type;
  Part part[parts];
};

/// `f` of each register of the operands, without a loop, so that none of them goes through memory.
template <class R, class F, class... A>
[[gnu::always_inline]] inline R by_part(F f, const A&... a) {
  R r;
  const auto set = [&]<std::size_t p>() __attribute__((always_inline)) { r.part[p] = f(a.part[p]...); };
  static_assert(R::parts <= 8);
  set.template operator()<0>();
  if constexpr (R::parts > 1) set.template operator()<1>();
  if constexpr (R::parts > 2) set.template operator()<2>(), set.template operator()<3>();
  if constexpr (R::parts > 4) set.template operator()<4>(), set.template operator()<5>();
  if constexpr (R::parts > 6) set.template operator()<6>(), set.template operator()<7>();
  return r;
}

template <int bytes>
struct IntegerOf;
template <>
struct IntegerOf<4> {
  using type = std::int32_t;
};
template <>
struct IntegerOf<8> {
  using type = std::int64_t;
};

/// Directions of rounding, as x86 numbers them.
enum Rounding { to_nearest = 0, down = 1, up = 2, to_zero = 3 };

// The functions that no operator is, of one register.
#if defined(__AVX512F__)
using Floats = VectorOf<float, 64>::type;
using Doubles = VectorOf<double, 64>::type;
[[gnu::always_inline]] inline Floats fma_of(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
[[gnu::always_inline]] inline Doubles fma_of(Doubles a, Doubles b, Doubles c) {
  return _mm512_fmadd_pd(a, b, c);
}
[[gnu::always_inline]] inline Floats sqrt_of(Floats x) { return _mm512_maskz_sqrt_ps(0xffff, x); }
[[gnu::always_inline]] inline Doubles sqrt_of(Doubles x) { return _mm512_maskz_sqrt_pd(0xff, x); }
template <int mode>
[[gnu::always_inline]] inline Floats rounded_of(Floats x) {
  return _mm512_maskz_roundscale_ps(0xffff, x, mode | _MM_FROUND_NO_EXC);
}
template <int mode>
[[gnu::always_inline]] inline Doubles rounded_of(Doubles x) {
  return _mm512_maskz_roundscale_pd(0xff, x, mode | _MM_FROUND_NO_EXC);
}
#elif defined(__FMA__) && defined(__AVX2__)
using Floats = VectorOf<float, 32>::type;
using Doubles = VectorOf<double, 32>::type;
[[gnu::always_inline]] inline Floats fma_of(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
[[gnu::always_inline]] inline Doubles fma_of(Doubles a, Doubles b, Doubles c) {
  return _mm256_fmadd_pd(a, b, c);
}
[[gnu::always_inline]] inline Floats sqrt_of(Floats x) { return _mm256_sqrt_ps(x); }
[[gnu::always_inline]] inline Doubles sqrt_of(Doubles x) { return _mm256_sqrt_pd(x); }
template <int mode>
[[gnu::always_inline]] inline Floats rounded_of(Floats x) {
  return _mm256_round_ps(x, mode | _MM_FROUND_NO_EXC);
}
template <int mode>
[[gnu::always_inline]] inline Doubles rounded_of(Doubles x) {
  return _mm256_round_pd(x, mode | _MM_FROUND_NO_EXC);
}
#elif defined(__aarch64__)
using Floats = VectorOf<float, 16>::type;
using Doubles = VectorOf<double, 16>::type;
[[gnu::always_inline]] inline Floats fma_of(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
[[gnu::always_inline]] inline Doubles fma_of(Doubles a, Doubles b, Doubles c) { return vfmaq_f64(c, a, b); }
[[gnu::always_inline]] inline Floats sqrt_of(Floats x) { return vsqrtq_f32(x); }
[[gnu::always_inline]] inline Doubles sqrt_of(Doubles x) { return vsqrtq_f64(x); }
template <int mode>
[[gnu::always_inline]] inline Floats rounded_of(Floats x) {
  return mode == to_nearest ? vrndnq_f32(x)
         : mode == down     ? vrndmq_f32(x)
         : mode == up       ? vrndpq_f32(x)
                            : vrndq_f32(x);
}
template <int mode>
[[gnu::always_inline]] inline Doubles rounded_of(Doubles x) {
  return mode == to_nearest ? vrndnq_f64(x)
         : mode == down     ? vrndmq_f64(x)
         : mode == up       ? vrndpq_f64(x)
                            : vrndq_f64(x);
}
#else
template <class V, class F>
inline V each_of(V x, const F& f) {
  for (std::size_t l = 0; l < sizeof x / sizeof x[0]; ++l) x[l] = f(x[l]);
  return x;
}
template <class V>
inline V fma_of(V a, V b, V c) {
  for (std::size_t l = 0; l < sizeof c / sizeof c[0]; ++l) c[l] = std::fma(a[l], b[l], c[l]);
  return c;
}
template <class V>
inline V sqrt_of(V x) {
  return each_of(x, [](auto lane) { return std::sqrt(lane); });
}
template <int mode, class V>
inline V rounded_of(V x) {
  return each_of(x, [](auto lane) {
    return mode == to_nearest ? std::rint(lane)
           : mode == down     ? std::floor(lane)
           : mode == up       ? std::ceil(lane)
                              : std::trunc(lane);
  });
}
#endif

/// Whether a register has a bit.
template <class V>
[[gnu::always_inline]] inline bool any_of(V v) {
#if defined(__AVX512F__)
  if constexpr (sizeof v == 64) {
    const auto words = std::bit_cast<__m512i>(v);
    return _mm512_test_epi64_mask(words, words) != 0;
  }
#elif defined(__AVX2__)
  if constexpr (sizeof v == 32) {
    const auto words = std::bit_cast<__m256i>(v);
    return _mm256_testz_si256(words, words) == 0;
  }
#endif
  std::uint64_t words[sizeof v / 8], all = 0;
  std::memcpy(words, &v, sizeof v);
  for (const std::uint64_t word : words) all |= word;
  return all != 0;
}

}  // namespace registers

/// What a comparison of lanes gives, each -1 or 0 in an integer of their size.
template <std::integral T, int count>
struct Truths : registers::Registers<T, count> {
  [[gnu::always_inline]] friend inline Truths operator&(Truths a, Truths b) {
    return registers::by_part<Truths>([](auto x, auto y) { return x & y; }, a, b);
  }
  [[gnu::always_inline]] friend inline Truths operator|(Truths a, Truths b) {
    return registers::by_part<Truths>([](auto x, auto y) { return x | y; }, a, b);
  }
  // Both sides are there anyhow.
  [[gnu::always_inline]] friend inline Truths operator&&(Truths a, Truths b) { return a & b; }
  [[gnu::always_inline]] friend inline Truths operator||(Truths a, Truths b) { return a | b; }
  [[gnu::always_inline]] friend inline Truths operator!=(Truths a, Truths b) {
    return registers::by_part<Truths>([](auto x, auto y) { return x ^ y; }, a, b);
  }
  [[gnu::always_inline]] friend inline Truths operator!(Truths a) {
    return registers::by_part<Truths>([](auto x) { return ~x; }, a);
  }
  [[gnu::always_inline]] friend inline bool any(Truths truths) {
    bool found = false;
    for (const auto& part : truths.part) found |= registers::any_of(part);
    return found;
  }
};

/// `count` numbers of type T, as many as a vector of 64 bytes has unless told. Operators and functions work
/// lane by lane.
template <class T, int count = 64 / static_cast<int>(sizeof(T))>
struct Lanes : registers::Registers<T, count> {
  using Truth = Truths<typename registers::IntegerOf<sizeof(T)>::type, count>;
  using Vector = typename registers::VectorOf<T, count* static_cast<int>(sizeof(T))>::type;

  Lanes() = default;
  /// Each of them.
  [[gnu::always_inline]] Lanes(T x) {
    for (auto& part : this->part) part = typename Lanes::Part{} + x;
  }
  [[gnu::always_inline]] explicit Lanes(const Vector& v) { std::memcpy(this->part, &v, sizeof v); }
  [[gnu::always_inline]] Vector vector() const { return std::bit_cast<Vector>(*this); }

  [[gnu::always_inline]] friend inline Lanes operator+(Lanes a, Lanes b) {
    return registers::by_part<Lanes>([](auto x, auto y) { return x + y; }, a, b);
  }
  [[gnu::always_inline]] friend inline Lanes operator-(Lanes a, Lanes b) {
    return registers::by_part<Lanes>([](auto x, auto y) { return x - y; }, a, b);
  }
  [[gnu::always_inline]] friend inline Lanes operator*(Lanes a, Lanes b) {
    return registers::by_part<Lanes>([](auto x, auto y) { return x * y; }, a, b);
  }
  [[gnu::always_inline]] friend inline Lanes operator/(Lanes a, Lanes b) {
    return registers::by_part<Lanes>([](auto x, auto y) { return x / y; }, a, b);
  }
  [[gnu::always_inline]] Lanes& operator+=(Lanes b) { return *this = *this + b; }
  [[gnu::always_inline]] Lanes& operator-=(Lanes b) { return *this = *this - b; }
  [[gnu::always_inline]] Lanes& operator*=(Lanes b) { return *this = *this * b; }
  [[gnu::always_inline]] Lanes& operator/=(Lanes b) { return *this = *this / b; }
  [[gnu::always_inline]] friend inline Lanes operator&(Lanes a, Lanes b) {
    return registers::by_part<Lanes>([](auto x, auto y) { return x & y; }, a, b);
  }
  [[gnu::always_inline]] friend inline Lanes operator|(Lanes a, Lanes b) {
    return registers::by_part<Lanes>([](auto x, auto y) { return x | y; }, a, b);
  }
  [[gnu::always_inline]] friend inline Lanes operator^(Lanes a, Lanes b) {
    return registers::by_part<Lanes>([](auto x, auto y) { return x ^ y; }, a, b);
  }
  [[gnu::always_inline]] friend inline Lanes operator-(Lanes a) {
    return registers::by_part<Lanes>([](auto x) { return -x; }, a);
  }
  [[gnu::always_inline]] friend inline Lanes operator~(Lanes a) {
    return registers::by_part<Lanes>([](auto x) { return ~x; }, a);
  }
  [[gnu::always_inline]] friend inline Lanes operator<<(Lanes a, int by) {
    return registers::by_part<Lanes>([by](auto x) { return x << by; }, a);
  }
  [[gnu::always_inline]] friend inline Lanes operator>>(Lanes a, int by) {
    return registers::by_part<Lanes>([by](auto x) { return x >> by; }, a);
  }
  [[gnu::always_inline]] friend inline Truth operator<(Lanes a, Lanes b) {
    return registers::by_part<Truth>([](auto x, auto y) { return x < y; }, a, b);
  }
  [[gnu::always_inline]] friend inline Truth operator<=(Lanes a, Lanes b) {
    return registers::by_part<Truth>([](auto x, auto y) { return x <= y; }, a, b);
  }
  [[gnu::always_inline]] friend inline Truth operator>(Lanes a, Lanes b) {
    return registers::by_part<Truth>([](auto x, auto y) { return x > y; }, a, b);
  }
  [[gnu::always_inline]] friend inline Truth operator>=(Lanes a, Lanes b) {
    return registers::by_part<Truth>([](auto x, auto y) { return x >= y; }, a, b);
  }
  [[gnu::always_inline]] friend inline Truth operator==(Lanes a, Lanes b) {
    return registers::by_part<Truth>([](auto x, auto y) { return x == y; }, a, b);
  }
  [[gnu::always_inline]] friend inline Truth operator!=(Lanes a, Lanes b) {
    return registers::by_part<Truth>([](auto x, auto y) { return x != y; }, a, b);
  }
  [[gnu::always_inline]] friend inline Lanes where(Truth c, Lanes a, Lanes b) {
    return registers::by_part<Lanes>([](auto t, auto x, auto y) { return t ? x : y; }, c, a, b);
  }
  [[gnu::always_inline]] friend inline Lanes only_if(Truth c, Lanes a) { return where(c, a, Lanes(T(0))); }

  [[gnu::always_inline]] friend inline Lanes fma(Lanes a, Lanes b, Lanes c) {
    return registers::by_part<Lanes>([](auto x, auto y, auto z) { return registers::fma_of(x, y, z); }, a, b,
                                     c);
  }
  [[gnu::always_inline]] friend inline Lanes sqrt(Lanes a) {
    return registers::by_part<Lanes>([](auto x) { return registers::sqrt_of(x); }, a);
  }
  [[gnu::always_inline]] friend inline Lanes rint(Lanes a) {
    return registers::by_part<Lanes>([](auto x) { return registers::rounded_of<registers::to_nearest>(x); },
                                     a);
  }
  [[gnu::always_inline]] friend inline Lanes floor(Lanes a) {
    return registers::by_part<Lanes>([](auto x) { return registers::rounded_of<registers::down>(x); }, a);
  }
  [[gnu::always_inline]] friend inline Lanes ceil(Lanes a) {
    return registers::by_part<Lanes>([](auto x) { return registers::rounded_of<registers::up>(x); }, a);
  }
  [[gnu::always_inline]] friend inline Lanes trunc(Lanes a) {
    return registers::by_part<Lanes>([](auto x) { return registers::rounded_of<registers::to_zero>(x); }, a);
  }
  [[gnu::always_inline]] friend inline Lanes fabs(Lanes a) {
    using Bits = typename Lanes::Bits;
    return std::bit_cast<Lanes>(std::bit_cast<Bits>(a) & ~Bits(sign_bit));
  }
  [[gnu::always_inline]] friend inline Lanes copysign(Lanes a, Lanes b) {
    using Bits = typename Lanes::Bits;
    return std::bit_cast<Lanes>((std::bit_cast<Bits>(a) & ~Bits(sign_bit)) |
                                (std::bit_cast<Bits>(b) & Bits(sign_bit)));
  }

  friend Lanes fmod(Lanes a, Lanes b) {
    T x[count], y[count];
    std::memcpy(x, a.part, sizeof x);
    std::memcpy(y, b.part, sizeof y);
    for (int l = 0; l < count; ++l) x[l] = std::fmod(x[l], y[l]);
    std::memcpy(a.part, x, sizeof x);
    return a;
  }

 private:
  using Unsigned = std::make_unsigned_t<typename registers::IntegerOf<sizeof(T)>::type>;
  using Bits = Lanes<Unsigned, count>;
  static constexpr Unsigned sign_bit = Unsigned{1} << (8 * sizeof(T) - 1);
};

namespace registers {

/// Half of a register, as a register of numbers twice as wide is made of it.
template <std::size_t first, class V, std::size_t... l>
[[gnu::always_inline]] inline auto some_of(V v, std::index_sequence<l...>) {
  return __builtin_shufflevector(v, v, (first + l)...);
}
template <class V, std::size_t... l>
[[gnu::always_inline]] inline auto both_of(V a, V b, std::index_sequence<l...>) {
  return __builtin_shufflevector(a, b, l...);
}

}  // namespace registers

template <int count>
[[gnu::always_inline]] inline Lanes<double, count> to_double(Lanes<float, count> x) {
  Lanes<double, count> y;
  using Wide = typename Lanes<double, count>::Part;
  constexpr std::size_t n = sizeof(Wide) / sizeof(double);
  static_assert(y.parts == 2 * x.parts);
  [&]<std::size_t... p>(std::index_sequence<p...>) __attribute__((always_inline)) {
    ((y.part[p] = __builtin_convertvector(
          registers::some_of<p % 2 * n>(x.part[p / 2], std::make_index_sequence<n>{}), Wide)),
     ...);
  }(std::make_index_sequence<y.parts>{});
  return y;
}
template <int count>
[[gnu::always_inline]] inline Lanes<float, count> to_single(Lanes<double, count> x) {
  Lanes<float, count> y;
  using Narrow = typename registers::VectorOf<float, sizeof(typename Lanes<float, count>::Part) / 2>::type;
  [&]<std::size_t... p>(std::index_sequence<p...>) __attribute__((always_inline)) {
    ((y.part[p] = registers::both_of(__builtin_convertvector(x.part[2 * p], Narrow),
                                     __builtin_convertvector(x.part[2 * p + 1], Narrow),
                                     std::make_index_sequence<sizeof(Narrow) / 2>{})),
     ...);
  }(std::make_index_sequence<y.parts>{});
  return y;
}

/// Sixteen integers of 8 or 16 bits in memory as lanes of 32, and back: what does not fit is cut off.
template <class T>
[[gnu::always_inline]] inline Lanes<std::uint32_t> load_narrow(const void* p) {
  Lanes<std::uint32_t> words;
  using Wide = typename Lanes<std::uint32_t>::Part;
  using Narrow = typename registers::VectorOf<T, sizeof(Wide) / 4 * sizeof(T)>::type;
  for (int k = 0; k < words.parts; ++k) {
    Narrow some;
    std::memcpy(&some, static_cast<const char*>(p) + k * sizeof some, sizeof some);
    words.part[k] = __builtin_convertvector(some, Wide);
  }
  return words;
}
[[gnu::always_inline]] inline Lanes<std::uint32_t> load_u8(const void* p) {
  return load_narrow<std::uint8_t>(p);
}
[[gnu::always_inline]] inline Lanes<std::uint32_t> load_u16(const void* p) {
  return load_narrow<std::uint16_t>(p);
}
[[gnu::always_inline]] inline void store_u16(void* p, Lanes<std::uint32_t> words) {
  using Narrow = registers::VectorOf<std::uint16_t, sizeof(words.part[0]) / 2>::type;
  for (int k = 0; k < words.parts; ++k) {
    const Narrow some = __builtin_convertvector(words.part[k], Narrow);
    std::memcpy(static_cast<char*>(p) + k * sizeof some, &some, sizeof some);
  }
}

template <class T>
inline constexpr bool is_half_type = std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;

/// Elements in memory as lanes of what they are computed in, and back.
template <class C, class T>
[[gnu::always_inline]] inline Lanes<C> load_lanes(const T* p) {
  if constexpr (std::is_same_v<C, T>) {
    Lanes<C> lanes;
    std::memcpy(lanes.part, p, sizeof lanes.part);
    return lanes;
  } else if constexpr (std::is_same_v<T, Half>) {
    return std::bit_cast<Lanes<C>>(sherd::detail::f32_of_f16(load_u16(p)));
  } else {
    static_assert(std::is_same_v<T, BFloat16>);
    return std::bit_cast<Lanes<C>>(sherd::detail::f32_of_bf16(load_u16(p)));
  }
}
template <class C, class T>
[[gnu::always_inline]] inline void store_lanes(T* p, const Lanes<C>& lanes) {
  if constexpr (std::is_same_v<C, T>)
    std::memcpy(p, lanes.part, sizeof lanes.part);
  else if constexpr (std::is_same_v<T, Half>)
    store_u16(p, sherd::detail::f16_of_f32(std::bit_cast<Lanes<std::uint32_t>>(lanes)));
  else
    store_u16(p, sherd::detail::bf16_of_f32(std::bit_cast<Lanes<std::uint32_t>>(lanes)));
}
/// Of the first `count` elements; the other lanes are 0.
template <class C, class T>
[[gnu::always_inline]] inline Lanes<C> load_lanes(const T* p, std::int64_t count) {
  T some[64 / sizeof(C)] = {};
  for (std::int64_t l = 0; l < count; ++l) some[l] = p[l];
  return load_lanes<C>(static_cast<const T*>(some));
}
template <class C, class T>
[[gnu::always_inline]] inline void store_lanes(T* p, const Lanes<C>& lanes, std::int64_t count) {
  T some[64 / sizeof(C)];
  store_lanes<C>(static_cast<T*>(some), lanes);
  for (std::int64_t l = 0; l < count; ++l) p[l] = some[l];
}

}  // namespace sherd::cpu

template <class T, int count>
struct sherd::math::NumberKind<sherd::cpu::Lanes<T, count>> {
  using Element = T;
  template <class U>
  using Of = sherd::cpu::Lanes<U, count>;
};

template <class T, int size>
struct std::numeric_limits<sherd::cpu::Lanes<T, size>> {
  static sherd::cpu::Lanes<T, size> infinity() { return std::numeric_limits<T>::infinity(); }
  static sherd::cpu::Lanes<T, size> quiet_NaN() { return std::numeric_limits<T>::quiet_NaN(); }
};

namespace sherd::math::detail {

/// See the form for one number: one by one, since hardly any angle is so large.
template <class T, int count>
void replace_large(Quarters<cpu::Lanes<T, count>>& of, cpu::Lanes<T, count> a) {
  using Int = typename Format<T>::Int;
  T angle[count], high[count], low[count];
  Int quarters[count];
  std::memcpy(angle, a.part, sizeof angle);
  std::memcpy(high, of.rest.high.part, sizeof high);
  std::memcpy(low, of.rest.low.part, sizeof low);
  std::memcpy(quarters, of.count.part, sizeof quarters);
  for (int l = 0; l < count; ++l) {
    Quarters<T> one{{high[l], low[l]}, quarters[l]};
    if (is_large(angle[l])) replace_large(one, angle[l]);
    high[l] = one.rest.high, low[l] = one.rest.low, quarters[l] = one.count;
  }
  std::memcpy(of.rest.high.part, high, sizeof high);
  std::memcpy(of.rest.low.part, low, sizeof low);
  std::memcpy(of.count.part, quarters, sizeof quarters);
}

}  // namespace sherd::math::detail
