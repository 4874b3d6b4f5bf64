// How functors stand in the source of a fused region's kernel: by the name of their type, and their bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "runtime/elementwise.h"
#include "runtime/export.h"
#include "runtime/kernel.h"

namespace sherd::cuda {

/// Of the op whose kernels are in a row.
struct FunctorSource {
  std::string_view type;  ///< the functor's, in full
  /// Its bytes as numbers with commas between them; those that are no field's are 0.
  std::string (*bytes)(const void* functor);
  bool light = false;    ///< a few instructions
  std::string header{};  ///< what defines the type, where the library does not
};
/// What stands for the kernel that the row has for this device now. Another kernel in its place ends it.
SHERD_API void set_functor_source(const KernelRow& row, FunctorSource source);

namespace detail {

template <class T>
constexpr std::string_view type_name() {
  constexpr std::string_view all = __PRETTY_FUNCTION__;
  constexpr std::string_view before = "T = ";
  constexpr std::size_t first = all.find(before) + before.size();
  constexpr std::size_t behind = all.find("; std::string_view =", first);  // of g++, by that alias
  constexpr std::size_t end = behind != all.npos ? behind : all.rfind(']');
  return all.substr(first, end - first);
}

template <class F>
std::string bytes_of(const void* functor) {
  if constexpr (std::is_empty_v<F>) return {};
  F copy = *static_cast<const F*>(functor);
#if __has_builtin(__builtin_clear_padding)
  __builtin_clear_padding(&copy);
#endif
  std::array<unsigned char, sizeof(F)> bytes;
  std::memcpy(bytes.data(), &copy, sizeof(F));
  std::string text;
  for (const unsigned char byte : bytes) text += (text.empty() ? "" : ", ") + std::to_string(byte);
  return text;
}

template <class F>
void add_source_of(std::string_view header) {
  static_assert(std::is_trivially_copyable_v<F>);
  static_assert(type_name<F>().find("anonymous") == std::string_view::npos,
                "a functor in an anonymous namespace has no name in another text");
  set_functor_source(kernel_row<F>(),
                     {type_name<F>(), bytes_of<F>, sherd::detail::is_light<F>(), std::string(header)});
}

}  // namespace detail

/// Tells `Executor::fused` of an elementwise op and of its gradients that functors compute, whose kernels
/// were added before (`add_elementwise`, `add_gradient`): ops of that type become members of regions on a
/// GPU. `header`: the text of an application's header that defines `O`, which may include what functors may
/// (`runtime/functor.h`); its lines that include others are left out, so what else it needs stands before it
/// in the text. Text that NVRTC does not take has the members run one by one. Once, before programs are made.
template <class O>
void add_functor_source(std::string_view header = {}) {
  detail::add_source_of<O>(header);
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    const auto add_gradient = [&]<int i>() {
      if constexpr (sherd::detail::HasScalarGrad<O>)
        if constexpr (((sherd::detail::identity_grads<O>() >> i) & 1) == 0)
          detail::add_source_of<ElementwiseGrad<O, i>>(header);
    };
    (add_gradient.template operator()<static_cast<int>(I)>(), ...);
  }(std::make_index_sequence<O::arity>{});
}

}  // namespace sherd::cuda
