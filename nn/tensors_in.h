// Finding the tensors in the arguments and results of a module's forward.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/tensor.h"

namespace sherd::nn {

/// Whether a `T` can hold tensors that `each_tensor` finds.
template <class T>
consteval bool may_hold_tensors() {
  using V = std::remove_cvref_t<T>;
  constexpr auto nothing = [](Tensor&) {};
  if constexpr (std::is_base_of_v<Tensor, V> || requires(V& value) { tensors_in(value, nothing); }) {
    return true;
  } else if constexpr (requires { std::tuple_size<V>::value; }) {
    return []<std::size_t... I>(std::index_sequence<I...>) {
      return (may_hold_tensors<std::tuple_element_t<I, V>>() || ...);
    }(std::make_index_sequence<std::tuple_size<V>::value>{});
  } else if constexpr (requires { typename V::mapped_type; }) {
    return may_hold_tensors<typename V::mapped_type>();
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
      return may_hold_tensors<typename V::value_type>();
    else
      return false;
  } else {
    return false;
  }
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
