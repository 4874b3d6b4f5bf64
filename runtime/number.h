// A number that an op holds, in the type it was written in. Safe to include in device code.
#pragma once

#include <cmath>
#include <concepts>
#include <cstdint>
#include <limits>

#include "runtime/element.h"
#include "runtime/math_steps.h"

namespace sherd {

/// A floating number, an integer or a bool, as the caller wrote it: `add(x, 1)` holds an integer, so 2^53 + 1
/// stays what it is. Integers beyond i64 become floating.
class Number {
 public:
  enum class Kind : std::uint8_t { floating, integer, boolean };

  template <std::floating_point T>
  constexpr Number(T value) : floating_(static_cast<double>(value)), kind_(Kind::floating) {}
  template <std::integral T>
  constexpr Number(T value)
      : floating_(static_cast<double>(value)),
        integer_(static_cast<std::int64_t>(value)),
        kind_(std::same_as<T, bool> ? Kind::boolean : Kind::integer) {
    if (sizeof(T) == 8 && T(-1) > T(0) && static_cast<std::uint64_t>(value) >> 63 != 0)
      kind_ = Kind::floating;
  }

  constexpr Kind kind() const { return kind_; }
  constexpr bool is_floating() const { return kind_ == Kind::floating; }
  /// The value as a `T`. For a `T` that cannot hold it the result is undefined: ask `fits` first.
  template <class T>
  constexpr T as() const {
    // Floats without asking for the kind, which would keep loops from being vectors.
    if constexpr (std::floating_point<math::element_t<T>>)
      return T(static_cast<math::element_t<T>>(floating_));
    else
      return kind_ == Kind::floating ? static_cast<T>(floating_) : static_cast<T>(integer_);
  }
  /// The value as an element of a tensor, rounded once.
  template <class T>
  constexpr T element() const {
    return kind_ == Kind::floating ? static_cast<T>(floating_) : static_cast<T>(integer_);
  }
  /// Kind and value are the same; NaN equals NaN, so that equal ops are equal.
  friend constexpr bool operator==(Number a, Number b) {
    if (a.kind_ != b.kind_) return false;
    if (a.kind_ != Kind::floating) return a.integer_ == b.integer_;
    return a.floating_ == b.floating_ || (a.floating_ != a.floating_ && b.floating_ != b.floating_);
  }

 private:
  double floating_;           // of an integer too
  std::int64_t integer_ = 0;  // exactly what an integer or a bool is
  Kind kind_;
};

/// Whether `dtype` can hold `value`: floats take every number (rounded), integers whole numbers in their
/// range, bool takes false, true, 0 and 1.
constexpr bool fits(Number value, DType dtype) {
  if (is_floating(dtype)) return true;
  if (value.is_floating()) {
    const double v = value.as<double>();
    // Beyond 2^53 every double is whole; the bounds are exact in f64 and exclude NaN and infinities.
    if (!(v >= -9223372036854775808.0 && v < 9223372036854775808.0)) return false;
    if (static_cast<double>(static_cast<std::int64_t>(v)) != v) return false;
  }
  const auto v = value.as<std::int64_t>();
  return with_element < integral_dtypes | bool_dtype > (dtype, [&]<class T>() {
                                            using Limits = std::numeric_limits<T>;
                                            return v >= static_cast<std::int64_t>(Limits::min()) &&
                                                   v <= static_cast<std::int64_t>(Limits::max());
                                          });
}

}  // namespace sherd
