// Integer arithmetic that wraps around. Safe to include in device code.
#pragma once

#include <functional>
#include <type_traits>

namespace sherd::math {

/// `f(a, b)`; integers wrap around at the ends of their range, as two's complement does, all other types
/// compute as they are.
template <class F, class T>
constexpr T wrapping(F f, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(f(static_cast<U>(a), static_cast<U>(b)));
  } else {
    return f(a, b);
  }
}

/// -x; integers wrap around, so the negative of the smallest is itself.
template <class T>
constexpr T negated(T x) {
  if constexpr (std::is_integral_v<T>)
    return wrapping(std::minus<>{}, T(0), x);
  else
    return -x;  // not 0 - x, which is +0 where -x is -0
}

}  // namespace sherd::math
