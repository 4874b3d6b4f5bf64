// What an elementwise op is, and the functors that are made of it: its gradient, its forms with a bound
// scalar, its in-place form. Safe to include in device code: a functor is the same source on every device,
// instantiated with a number; with `Expr` it builds ops.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <string_view>
#include <type_traits>

#include "runtime/forward.h"
#include "runtime/math.h"
#include "runtime/number.h"

namespace sherd {

/// A list of types.
template <class... O>
struct OpList {
  template <class F>
  static void for_each(F&& f) {
    (f.template operator()<O>(), ...);
  }
  static constexpr std::size_t size = sizeof...(O);
};

/// Inputs that an elementwise op may have.
inline constexpr int max_elementwise_inputs = 5;

/// An op on each element: `arity`, `dtypes`, and a call on numbers. One of:
///  - `grad_a(gy, a, ..., y)` (and `grad_b`, ... for further inputs) with `reads_a`, ... saying what each of
///  them uses;
///    inputs whose gradient is `gy` itself are named in `identity_grads` instead;
///  - `Tensors grad(const GradArgs&) const` in ops, with `reads`;
///  - `differentiable = false`.
/// `light = true` says that it is a few instructions an element; the CPU then compiles a loop of its own for
/// each 16-bit dtype too, instead of converting blocks to f32 and back. `on_bits(x, ...)`, of unsigned
/// integers, is the same on the bits of a 16-bit float, for an op that needs no more than those.
template <class O>
concept ElementwiseOp = std::copyable<O> && std::equality_comparable<O> && requires {
  { O::name } -> std::convertible_to<std::string_view>;
  { O::arity } -> std::convertible_to<int>;
  { O::dtypes } -> std::convertible_to<DTypeSet>;
};

namespace detail {

/// A name that is a template's argument.
template <std::size_t Length>
struct FixedName {
  char text[Length] = {};
  consteval FixedName(const char (&from)[Length]) { std::copy_n(from, Length, text); }
  constexpr std::string_view view() const { return {text, Length - 1}; }
};

/// Two names as one, at compile time.
template <const std::string_view&... Parts>
struct JoinedName {
  static constexpr auto chars = [] {
    std::array<char, (Parts.size() + ... + 0)> text{};
    std::size_t at = 0;
    ((Parts.copy(text.data() + at, Parts.size()), at += Parts.size()), ...);
    return text;
  }();
  static constexpr std::string_view value{chars.data(), chars.size()};
};

template <class O>
inline constexpr std::string_view name_of_op = O::name;
inline constexpr std::string_view in_place_suffix = "_", grad_suffix = "_grad";

template <class O>
constexpr Mask identity_grads() {
  if constexpr (requires { O::identity_grads; })
    return O::identity_grads;
  else
    return 0;
}

/// Whether the op's result is bool whatever it is given.
template <class O>
constexpr bool gives_bool() {
  return requires { requires O::gives_bool; };
}

template <class O>
constexpr bool is_light() {
  if constexpr (requires { typename std::bool_constant<O::light>; })
    return std::same_as<decltype(O::light), const bool> && bool(O::light);
  else
    return false;
}

/// What the gradient of input I uses.
template <class O, int I>
constexpr Reads reads_of() {
  if constexpr ((identity_grads<O>() >> I) & 1)
    return {};
  else if constexpr (I == 0)
    return O::reads_a;
  else if constexpr (I == 1)
    return O::reads_b;
  else
    return O::reads_c;
}

/// Calls the gradient rule of input I.
template <int I, class O, class T, class... V>
constexpr T grad_of(const O& op, T gy, V... values) {
  if constexpr (I == 0)
    return op.grad_a(gy, values...);
  else if constexpr (I == 1)
    return op.grad_b(gy, values...);
  else
    return op.grad_c(gy, values...);
}

/// The value at place k of several.
template <int k, class T, class... More>
constexpr auto nth(T first, More... more) {
  if constexpr (k == 0)
    return first;
  else
    return nth<k - 1>(more...);
}

constexpr int count_bits(Mask m) { return m == 0 ? 0 : static_cast<int>(m & 1) + count_bits(m >> 1); }

}  // namespace detail

namespace detail {

/// The gradient of a functor of x that keeps x, as a functor of gy and x.
template <class F>
struct GradOfNumber {
  static constexpr bool light = is_light<F>();
  F f;
  template <class T>
  constexpr T operator()(T gy, T x) const {
    return f.grad_a(gy, x, x);
  }
};

}  // namespace detail

/// What every functor says, and all that one without fields has to say beside its rule:
/// `struct Sub : Functor<"sub", 2, number_dtypes> { ... };`. One with fields has these three members itself.
template <detail::FixedName Name, int Arity, DTypeSet DTypes>
struct Functor {
  static constexpr std::string_view name = Name.view();
  static constexpr int arity = Arity;
  static constexpr DTypeSet dtypes = DTypes;

  template <std::derived_from<Functor> O>
    requires std::is_empty_v<O>
  friend constexpr bool operator==(const O&, const O&) {
    return true;
  }
};

/// The gradient of input `I` of elementwise op `O` as one elementwise op: inputs are gy, the inputs it reads,
/// the output if read.
template <class O, int I>
struct ElementwiseGrad {
  static constexpr std::string_view name =
      detail::JoinedName<detail::name_of_op<O>, detail::grad_suffix>::value;
  static constexpr Reads kept = detail::reads_of<O, I>();
  static constexpr int arity = 1 + detail::count_bits(kept.inputs) + detail::count_bits(kept.outputs);
  static constexpr DTypeSet dtypes = O::dtypes;
  static constexpr bool light = detail::is_light<O>();
  O op;

  template <class T, class... V>
  constexpr T operator()(T gy, V... values) const {
    // A value that the rule looks at and did not name shows as NaN.
    const auto input = [&]<int i>() -> T {
      if constexpr (((kept.inputs >> i) & 1) != 0)
        return detail::nth<detail::count_bits(kept.inputs & ((Mask{1} << i) - 1))>(values...);
      else
        return std::numeric_limits<T>::quiet_NaN();
    };
    const auto output = [&]() -> T {
      if constexpr ((kept.outputs & 1) != 0)
        return detail::nth<detail::count_bits(kept.inputs)>(values...);
      else
        return std::numeric_limits<T>::quiet_NaN();
    };
    const T a = input.template operator()<0>();
    if constexpr (O::arity == 1)
      return detail::grad_of<I>(op, gy, a, output());
    else if constexpr (O::arity == 2)
      return detail::grad_of<I>(op, gy, a, input.template operator()<1>(), output());
    else
      return detail::grad_of<I>(op, gy, a, input.template operator()<1>(), input.template operator()<2>(),
                                output());
  }
  /// See `Pow::for_number`.
  template <class Body>
    requires(O::arity == 1 && kept.inputs == 1 && kept.outputs == 0) &&
            requires(const O& o, const Body& body) { o.for_number(body); }
  bool for_number(const Body& body) const {
    return op.for_number([&]<class F>(const F& f) { body(detail::GradOfNumber<F>{f}); });
  }
  bool operator==(const ElementwiseGrad&) const = default;
};

/// `op(x, value)` for a binary op and a number known when the op is made.
template <class O>
struct WithScalar {
  static constexpr std::string_view name = O::name;
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = O::dtypes;
  static constexpr bool light = detail::is_light<O>();
  static constexpr bool gives_bool = detail::gives_bool<O>();
  static constexpr bool differentiable = !requires { requires O::differentiable == false; };
  static constexpr Mask identity_grads = detail::identity_grads<O>() & 1;
  static constexpr Reads reads_a = [] {
    if constexpr (differentiable)
      return Reads{detail::reads_of<O, 0>().inputs & 1, detail::reads_of<O, 0>().outputs};
    else
      return Reads{};
  }();
  Number right = 0;
  O op{};

  template <class T>
  constexpr auto operator()(T x) const {
    return op(x, right.as<T>());
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T y) const {
    return op.grad_a(gy, x, right.as<T>(), y);
  }
  /// See `Pow::for_number`.
  template <class Body>
    requires requires(const Body& body) { O::for_number(Number(0), body); }
  bool for_number(const Body& body) const {
    return O::for_number(right, body);
  }
  void fields(auto&& on) const { on("right", right); }
  bool operator==(const WithScalar&) const = default;
};

/// `op(value, x)`.
template <class O>
struct ScalarWith {
  static constexpr std::string_view name = O::name;
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = O::dtypes;
  static constexpr bool light = detail::is_light<O>();
  static constexpr bool gives_bool = detail::gives_bool<O>();
  static constexpr bool differentiable = !requires { requires O::differentiable == false; };
  static constexpr Mask identity_grads = (detail::identity_grads<O>() >> 1) & 1;
  static constexpr Reads reads_a = [] {
    if constexpr (differentiable)
      return Reads{(detail::reads_of<O, 1>().inputs >> 1) & 1, detail::reads_of<O, 1>().outputs};
    else
      return Reads{};
  }();
  Number left = 0;
  O op{};

  template <class T>
  constexpr auto operator()(T x) const {
    return op(left.as<T>(), x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T y) const {
    return op.grad_b(gy, left.as<T>(), x, y);
  }
  void fields(auto&& on) const { on("left", left); }
  bool operator==(const ScalarWith&) const = default;
};

/// The form of `O` that writes its first input.
template <class O>
struct InPlace {
  static constexpr std::string_view name =
      detail::JoinedName<detail::name_of_op<O>, detail::in_place_suffix>::value;
  O op{};
  bool operator==(const InPlace&) const = default;
};

}  // namespace sherd
