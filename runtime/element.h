// The element types: one list, from which everything else about them follows. Safe to include in device code.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string_view>
#include <type_traits>
#include <utility>

#include "runtime/export.h"
#include "runtime/half.h"

namespace sherd {

/// Element type of a tensor.
enum class DType : std::uint8_t { f64, f32, f16, bf16, i64, i32, u8, boolean };

/// What a dtype is: its name, its name in PyTorch's messages, the type of an element, and the type that
/// arithmetic is done in. A new dtype is an enumerator and a line here.
template <DType>
struct Element;
// clang-format off
template <> struct Element<DType::f64>     { static constexpr std::string_view name = "f64", long_name = "Double"; using type = double; using compute = double; };
template <> struct Element<DType::f32>     { static constexpr std::string_view name = "f32", long_name = "Float"; using type = float; using compute = float; };
template <> struct Element<DType::f16>     { static constexpr std::string_view name = "f16", long_name = "Half"; using type = Half; using compute = float; };
template <> struct Element<DType::bf16>    { static constexpr std::string_view name = "bf16", long_name = "BFloat16"; using type = BFloat16; using compute = float; };
template <> struct Element<DType::i64>     { static constexpr std::string_view name = "i64", long_name = "Long"; using type = std::int64_t; using compute = std::int64_t; };
template <> struct Element<DType::i32>     { static constexpr std::string_view name = "i32", long_name = "Int"; using type = std::int32_t; using compute = std::int32_t; };
template <> struct Element<DType::u8>      { static constexpr std::string_view name = "u8", long_name = "Byte"; using type = std::uint8_t; using compute = std::uint8_t; };
template <> struct Element<DType::boolean> { static constexpr std::string_view name = "bool", long_name = "Bool"; using type = bool; using compute = bool; };
// clang-format on
inline constexpr int dtype_count = static_cast<int>(DType::boolean) + 1;

inline constexpr DType f64 = DType::f64, f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16,
                       i64 = DType::i64, i32 = DType::i32, u8 = DType::u8, boolean = DType::boolean;

/// A set of dtypes, as a mask; what an op accepts.
struct DTypeSet {
  std::uint16_t mask = 0;
  constexpr bool contains(DType d) const {
    return static_cast<int>(d) < dtype_count && ((mask >> static_cast<int>(d)) & 1) != 0;
  }
  constexpr DTypeSet operator|(DTypeSet o) const { return {static_cast<std::uint16_t>(mask | o.mask)}; }
};

namespace detail {

// Filled by plain recursion: not every device compiler takes packs here.
struct DTypeTable {
  DType all[dtype_count] = {};
  std::int64_t sizes[dtype_count] = {};
  std::string_view names[dtype_count], long_names[dtype_count];
  DTypeSet floating, integral, boolean;
};
template <int i = 0>
constexpr void fill(DTypeTable& table) {
  constexpr auto dtype = static_cast<DType>(i);
  using T = typename Element<dtype>::type;
  table.all[i] = dtype;
  table.sizes[i] = sizeof(T);
  table.names[i] = Element<dtype>::name;
  table.long_names[i] = Element<dtype>::long_name;
  DTypeSet& set = std::is_same_v<T, bool>                                      ? table.boolean
                  : std::is_floating_point_v<typename Element<dtype>::compute> ? table.floating
                                                                               : table.integral;
  set = set | DTypeSet{static_cast<std::uint16_t>(1 << i)};
  if constexpr (i + 1 < dtype_count) fill<i + 1>(table);
}
constexpr DTypeTable filled_table() {
  DTypeTable table;
  fill(table);
  return table;
}
inline constexpr DTypeTable dtype_table = filled_table();

/// The number of the dtype whose elements are `T`, or -1.
template <class T, int i = 0>
constexpr int find_dtype() {
  if constexpr (std::is_same_v<T, typename Element<static_cast<DType>(i)>::type>)
    return i;
  else if constexpr (i + 1 < dtype_count)
    return find_dtype<T, i + 1>();
  else
    return -1;
}
template <class T>
inline constexpr int dtype_number = find_dtype<T>();

}  // namespace detail

inline constexpr DTypeSet floating_dtypes = detail::dtype_table.floating,
                          integral_dtypes = detail::dtype_table.integral,
                          bool_dtype = detail::dtype_table.boolean;
inline constexpr DTypeSet number_dtypes = floating_dtypes | integral_dtypes,
                          any_dtype = number_dtypes | bool_dtype;
/// Every dtype, in the order of the enumerators.
inline constexpr auto& all_dtypes = detail::dtype_table.all;

/// Bytes of one element.
constexpr std::int64_t size_of(DType d) { return detail::dtype_table.sizes[static_cast<int>(d)]; }
/// "f32", "bf16", ..., "bool".
constexpr std::string_view name_of(DType d) { return detail::dtype_table.names[static_cast<int>(d)]; }
/// Writes `name_of(dtype)`.
SHERD_API std::ostream& operator<<(std::ostream& out, DType dtype);
/// The dtype's name in PyTorch's messages, for those that programs match on: "Float", "BFloat16".
constexpr std::string_view long_name_of(DType d) {
  return detail::dtype_table.long_names[static_cast<int>(d)];
}
constexpr bool is_floating(DType d) { return floating_dtypes.contains(d); }
constexpr bool is_integral(DType d) { return integral_dtypes.contains(d); }

namespace detail {
template <class T, int number = dtype_number<T>>
struct ComputeOf : std::type_identity<typename Element<static_cast<DType>(number)>::compute> {};
template <class T>
struct ComputeOf<T, -1> : std::type_identity<T> {};
}  // namespace detail

/// The dtype whose elements are `T`.
template <class T>
inline constexpr DType dtype_of = [] {
  static_assert(detail::dtype_number<T> >= 0, "the list above has no such element type");
  return static_cast<DType>(detail::dtype_number<T>);
}();

/// The type arithmetic is done in: float for 16-bit floats, the type itself otherwise.
template <class T>
using compute_t = typename detail::ComputeOf<T>::type;

/// The dtype in which floats of dtype `d` are summed: f32, or f64 for f64.
constexpr DType compute_dtype(DType d) { return d == DType::f64 ? DType::f64 : DType::f32; }

/// Calls `f.operator()<T>()` with the element type of `d`, which is one of `set`, and gives its result.
template <DTypeSet set = any_dtype, int i = 0, class F>
constexpr decltype(auto) with_element(DType d, F&& f) {
  if constexpr (!set.contains(static_cast<DType>(i))) {
    return with_element<set, i + 1>(d, f);
  } else {
    constexpr int rest = set.mask >> (i + 1);
    if constexpr (rest != 0)
      if (d != static_cast<DType>(i)) return with_element<set, i + 1>(d, f);
    return f.template operator()<typename Element<static_cast<DType>(i)>::type>();
  }
}

}  // namespace sherd
