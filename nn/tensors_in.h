// Finding the tensors in the arguments and results of a module's forward.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/tensor.h"

namespace sherd::nn {

namespace detail {

/// What is known of the tensors in a type.
enum class Holds : std::uint8_t {
  none,     ///< a number, a string, a container of those
  unknown,  ///< a class of which `each_tensor` cannot tell
  tensors,  ///< which `each_tensor` finds
};

/// What a `T` can hold.
template <class T>
consteval Holds holds() {
  using V = std::remove_cvref_t<T>;
  constexpr auto nothing = [](Tensor&) {};
  if constexpr (std::is_base_of_v<Tensor, V> || requires(V& value) { tensors_in(value, nothing); }) {
    return Holds::tensors;
  } else if constexpr (requires { std::tuple_size<V>::value; }) {
    return []<std::size_t... I>(std::index_sequence<I...>) {
      return std::max({Holds::none, holds<std::tuple_element_t<I, V>>()...});
    }(std::make_index_sequence<std::tuple_size<V>::value>{});
  } else if constexpr (requires { typename V::mapped_type; }) {
    return holds<typename V::mapped_type>();
  } else if constexpr (std::is_convertible_v<V, std::string_view>) {
    return Holds::none;
  } else if constexpr (
      requires(V& value) {
        value.has_value();
        *value;
      } ||
      requires(V& value) {
        value.begin();
        value.end();
      }) {
    if constexpr (requires { typename V::value_type; })
      return holds<typename V::value_type>();
    else
      return Holds::unknown;
  } else {
    return std::is_class_v<V> ? Holds::unknown : Holds::none;
  }
}

}  // namespace detail

/// Whether a `T` can hold tensors that `each_tensor` finds.
template <class T>
consteval bool may_hold_tensors() {
  return detail::holds<T>() == detail::Holds::tensors;
}

/// Calls `visit(Tensor&)` for every tensor in `value`: tensors (of an `x[...]` the part), and pairs, tuples,
/// vectors, arrays, optionals and map values of them; also for a struct whose namespace has a function
/// `tensors_in(T&, visit)`. Other types hold none. (A function `values_in(const T&, visit)` beside it, which
/// names the struct's other fields, lets a compiled module take the struct, see nn/compile.h.)
template <class T, class F>
void each_tensor(T& value, F&& visit) {
  if constexpr (std::is_base_of_v<Tensor, T>) {
    visit(static_cast<Tensor&>(value));
  } else if constexpr (requires { tensors_in(value, visit); }) {
    tensors_in(value, visit);
  } else if constexpr (requires { std::tuple_size<std::remove_const_t<T>>::value; }) {
    std::apply([&](auto&... items) { (each_tensor(items, visit), ...); }, value);
  } else if constexpr (requires {
                         value.has_value();
                         *value;
                       }) {
    if (value.has_value()) each_tensor(*value, visit);
  } else if constexpr (requires { typename T::mapped_type; }) {
    for (auto& [key, item] : value) each_tensor(item, visit);
  } else if constexpr (requires {
                         value.begin();
                         value.end();
                         typename T::value_type;
                       } && !std::is_convertible_v<T, std::string_view>) {
    for (auto& item : value) each_tensor(item, visit);
  }
}

}  // namespace sherd::nn
