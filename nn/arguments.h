// A forward's arguments as a program's inputs, and its result made again from a program's outputs.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "nn/tensors_in.h"

namespace sherd::nn::detail {

template <std::size_t>
using TensorAt = Tensor;

template <class T, std::size_t... I>
consteval bool made_of_tensors(std::index_sequence<I...>) {
  return requires { T{TensorAt<I>{}...}; };
}
/// Whether a struct whose tensors `each_tensor` finds has no other fields.
template <class T>
consteval bool has_only_tensors() {
  if constexpr (std::is_aggregate_v<T> && sizeof(T) % sizeof(Tensor) == 0 && sizeof(T) <= 64 * sizeof(Tensor))
    return made_of_tensors<T>(std::make_index_sequence<sizeof(T) / sizeof(Tensor)>{});
  else
    return false;
}

template <class T>
concept TupleOfArguments = requires { std::tuple_size<T>::value; };
template <class T>
concept OptionalArgument = requires(const T& value) {
  value.has_value();
  *value;
};
template <class T>
concept ListOfArguments = requires(const T& value) {
  typename T::value_type;
  value.begin();
  value.end();
} && !requires { typename T::mapped_type; };

/// Appends the tensors in `value` and everything else that a call depends on; or names in `unfit` a type of
/// which not all can be told.
template <class T>
void describe(const T& value, std::vector<Tensor>& tensors, std::vector<std::uint64_t>& words,
              std::string& unfit) {
  const auto add = [&](const Tensor& t) {
    words.push_back(t.defined() ? 1 : 0);
    if (t.defined()) tensors.push_back(t);
  };
  if constexpr (std::is_base_of_v<Tensor, T>) {
    add(value);
  } else if constexpr (TensorLike<T>) {
    add(static_cast<const Tensor&>(value));
  } else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) {
    std::uint64_t word = 0;
    static_assert(sizeof(T) <= 2 * sizeof(word));
    std::memcpy(&word, &value, std::min(sizeof(T), sizeof(word)));
    words.push_back(word);
    if constexpr (sizeof(T) > sizeof(word)) unfit = "a long double";
  } else if constexpr (requires(T& found) { tensors_in(found, [](Tensor&) {}); }) {
    constexpr bool names_values = requires { values_in(value, [](const auto&) {}); };
    if constexpr (names_values)
      values_in(value, [&](const auto& field) { describe(field, tensors, words, unfit); });
    if constexpr (names_values || has_only_tensors<T>()) {
      const auto* begin = reinterpret_cast<const std::byte*>(&value);
      each_tensor(const_cast<T&>(value), [&](Tensor& t) {
        words.push_back(static_cast<std::uint64_t>(reinterpret_cast<const std::byte*>(&t) - begin));
        add(t);
      });
      words.push_back(~std::uint64_t{0});
    } else {
      unfit = "an argument that is a struct with more than tensors";
    }
  } else if constexpr (TupleOfArguments<T>) {
    std::apply([&](const auto&... items) { (describe(items, tensors, words, unfit), ...); }, value);
  } else if constexpr (OptionalArgument<T>) {
    words.push_back(value.has_value() ? 1 : 0);
    if (value.has_value()) describe(*value, tensors, words, unfit);
  } else if constexpr (ListOfArguments<T>) {
    words.push_back(static_cast<std::uint64_t>(std::distance(value.begin(), value.end())));
    for (const auto& item : value) describe(item, tensors, words, unfit);
  } else {
    unfit =
        "an argument whose values no key can name: neither tensors, numbers, text, lists nor optionals of "
        "these, nor a type with tensors_in and values_in";
  }
}

/// The same of an argument that its caller has after the call.
template <class A, class T>
void describe_lasting(const T& value, std::vector<Tensor>& tensors, std::vector<std::uint64_t>& words,
                      std::string& unfit) {
  constexpr bool lasts = std::is_lvalue_reference_v<A> && !std::is_const_v<std::remove_reference_t<A>>;
  if constexpr (lasts && !std::is_base_of_v<Tensor, T>) describe(value, tensors, words, unfit);
}

/// Whether a result can be copied, and its tensors be replaced by others.
template <class T>
consteval bool can_be_made_again() {
  if constexpr (std::is_void_v<T>)
    return false;
  else
    return std::copyable<T> && may_hold_tensors<T>();
}

template <class T>
std::vector<Tensor> tensors_of(T& result) {
  std::vector<Tensor> tensors;
  each_tensor(result, [&](Tensor& t) { tensors.push_back(t); });
  return tensors;
}

/// The result without its tensors' memory: where it has tensors, it has an element of nothing.
template <class T>
std::shared_ptr<const void> form_of(const T& result) {
  auto form = std::make_shared<T>(result);
  each_tensor(*form, [&](Tensor& t) {
    if (t.defined()) t = empty(Shape{0}, {t.dtype(), Device::meta()});
  });
  return form;
}

template <class T>
T made_again(const std::shared_ptr<const void>& form, const std::vector<Tensor>& tensors) {
  T result = *static_cast<const T*>(form.get());
  std::size_t i = 0;
  each_tensor(result, [&](Tensor& t) { t = tensors[i++]; });
  return result;
}

}  // namespace sherd::nn::detail
