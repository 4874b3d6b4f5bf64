// How functors stand in the source of a region's kernel: by the name of their type and their bytes.
#include <array>
#include <cstring>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "runtime/cuda/region_source.h"
#include "runtime/elementwise.h"
#include "runtime/ops/elementwise_list.h"

namespace sherd::cuda {
namespace {

/// The name of a type, in full.
template <class T>
constexpr std::string_view type_name() {
  constexpr std::string_view all = __PRETTY_FUNCTION__;
  constexpr std::string_view before = "T = ";
  constexpr std::size_t first = all.find(before) + before.size();
  constexpr std::size_t end = all.find_first_of(";]", first);
  return all.substr(first, end - first);
}

struct FunctorSource {
  std::string_view type;
  std::string (*bytes)(const void* functor);
  Kernel kernel;  ///< whoever has put another one in its place means that one
};

/// Without those between fields, which may be anything.
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
  for (const unsigned char byte : bytes) text += fmt::format("{}{}", text.empty() ? "" : ", ", byte);
  return text;
}

std::unordered_map<const KernelRow*, FunctorSource>& sources() {
  static std::unordered_map<const KernelRow*, FunctorSource> all;
  return all;
}

template <class O>
void add() {
  static_assert(std::is_trivially_copyable_v<O>);
  const KernelRow& row = kernel_row<O>();
  sources()[&row] = {type_name<O>(), bytes_of<O>, row.on(DeviceType::cuda)};
}

template <class O>
void add_with_gradients() {
  add<O>();
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    const auto add_gradient = [&]<int i>() {
      if constexpr (sherd::detail::HasScalarGrad<O>)
        if constexpr (((sherd::detail::identity_grads<O>() >> i) & 1) == 0) add<ElementwiseGrad<O, i>>();
    };
    (add_gradient.template operator()<static_cast<int>(I)>(), ...);
  }(std::make_index_sequence<O::arity>{});
}

}  // namespace

std::string functor_source(const AnyOp& op) {
  const auto its = sources().find(&op.kernels());
  if (its == sources().end() || its->second.kernel == nullptr ||
      its->second.kernel != op.kernels().on(DeviceType::cuda))
    return {};
  return fmt::format("functor<{}>({})", its->second.type, its->second.bytes(op.value()));
}

void add_functor_sources() {
  const auto all = []<class O>() { add_with_gradients<O>(); };
  ops::UnaryOps::for_each(all);
  ops::ArithmeticOps::for_each(all);
  ops::ComparisonOps::for_each(all);
  ops::BoundRight::for_each([]<class O>() { add_with_gradients<WithScalar<O>>(); });
  ops::BoundLeft::for_each([]<class O>() { add_with_gradients<ScalarWith<O>>(); });
  add<ops::Where>();
}

}  // namespace sherd::cuda
