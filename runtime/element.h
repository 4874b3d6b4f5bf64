// The element types. Safe to include in device code.
#pragma once

#include <cstdint>
#include <string_view>

#include "runtime/half.h"

namespace sherd {

/// Element type of a tensor.
enum class DType : std::uint8_t { f64, f32, f16, bf16, i64, i32, u8, boolean };

inline constexpr DType f64 = DType::f64, f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16,
                       i64 = DType::i64, i32 = DType::i32, u8 = DType::u8, boolean = DType::boolean;
inline constexpr DType all_dtypes[] = {f64, f32, f16, bf16, i64, i32, u8, boolean};

/// Bytes of one element.
constexpr std::int64_t size_of(DType d) {
  constexpr std::int64_t sizes[] = {8, 4, 2, 2, 8, 4, 1, 1};
  return sizes[static_cast<int>(d)];
}
/// "f32", "bf16", ..., "bool".
constexpr std::string_view name_of(DType d) {
  constexpr std::string_view names[] = {"f64", "f32", "f16", "bf16", "i64", "i32", "u8", "bool"};
  return names[static_cast<int>(d)];
}
constexpr bool is_floating(DType d) { return d <= DType::bf16; }
constexpr bool is_integral(DType d) { return d == DType::i64 || d == DType::i32 || d == DType::u8; }

/// A set of dtypes, as a mask; what an op accepts.
struct DTypeSet {
  std::uint16_t mask = 0;
  constexpr bool contains(DType d) const { return (mask >> static_cast<int>(d)) & 1; }
  constexpr DTypeSet operator|(DTypeSet o) const { return {static_cast<std::uint16_t>(mask | o.mask)}; }
};
inline constexpr DTypeSet floating_dtypes{0b00001111}, integral_dtypes{0b01110000}, bool_dtype{0b10000000};
inline constexpr DTypeSet number_dtypes{0b01111111}, any_dtype{0b11111111};

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct DTypeOf<Half> {
  static constexpr DType value = DType::f16;
};
template <>
struct DTypeOf<BFloat16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct DTypeOf<std::int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::u8;
};
template <>
struct DTypeOf<bool> {
  static constexpr DType value = DType::boolean;
};
/// The dtype whose elements are `T`.
template <class T>
inline constexpr DType dtype_of = DTypeOf<T>::value;

/// The type arithmetic is done in: float for 16-bit floats, the type itself otherwise.
template <class T>
struct ComputeOf {
  using type = T;
};
template <>
struct ComputeOf<Half> {
  using type = float;
};
template <>
struct ComputeOf<BFloat16> {
  using type = float;
};
template <class T>
using compute_t = typename ComputeOf<T>::type;

}  // namespace sherd
