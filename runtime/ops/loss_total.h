// The mean or sum of a loss over all elements of two tensors, in one pass: of any loss that is an elementwise
// op, which stays the one place where it stands. Safe to include in device code; what looks into tensors is
// in runtime/loss.h.
#pragma once

#include <limits>
#include <span>
#include <string_view>

#include "runtime/functor.h"

namespace sherd {

struct Spec;

namespace detail {

template <class O, int I>
concept HasRuleOfGradient = ((identity_grads<O>() >> I) & 1) != 0 || requires { reads_of<O, I>(); };

inline constexpr std::string_view total_suffix = "_total", total_grad_suffix = "_total_grad";

/// The gradient of input `I` of one element's loss; what a rule did not name is NaN to it, as to every
/// elementwise op's.
template <int I, class Loss, class C>
constexpr C gradient_of_loss(const Loss& loss, C gy, C x, C t) {
  if constexpr (((identity_grads<Loss>() >> I) & 1) != 0) {
    return gy;
  } else {
    constexpr Reads kept = reads_of<Loss, I>();
    constexpr C none = std::numeric_limits<C>::quiet_NaN();
    C y = none;
    if constexpr (has(kept.outputs, 0)) y = loss(x, t);
    return grad_of<I>(loss, gy, has(kept.inputs, 0) ? x : none, has(kept.inputs, 1) ? t : none, y);
  }
}

}  // namespace detail

/// A loss of one element: an elementwise op of two inputs, input and target, with a functor for the gradient
/// of each.
template <class O>
concept ElementwiseLoss = ElementwiseOp<O> && O::arity == 2 && !detail::gives_bool<O>() &&
                          detail::HasRuleOfGradient<O, 0> && detail::HasRuleOfGradient<O, 1>;

namespace ops {

/// Inputs: input and target of one shape. Output: the sum of their losses over all elements, or the mean,
/// 0-d; of 16-bit floats summed in f32 and rounded once.
template <ElementwiseLoss Loss>
struct SHERD_API LossTotal {
  static constexpr std::string_view name =
      detail::JoinedName<detail::name_of_op<Loss>, detail::total_suffix>::value;
  static constexpr Arity arity = 2;
  static constexpr Mask dense = 0b11;
  static constexpr Reads reads{.inputs = 0b11};
  Loss loss{};
  bool mean = true;

  InlineVec<Spec, 2> infer(std::span<const Spec> in) const;
  Tensors reference(std::span<const Tensor> in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    if constexpr (requires { loss.fields(on); }) loss.fields(on);
    on("mean", mean);
  }
  bool operator==(const LossTotal&) const = default;
};

/// Inputs: the gradient of the total, input and target. Outputs: the gradients of those of the last two that
/// `needs` names.
template <ElementwiseLoss Loss>
struct SHERD_API LossTotalGrad {
  static constexpr std::string_view name =
      detail::JoinedName<detail::name_of_op<Loss>, detail::total_grad_suffix>::value;
  static constexpr Arity arity = 3;
  static constexpr Mask dense = 0b111;
  LossTotal<Loss> forward;
  Mask needs = 0b11;

  InlineVec<Spec, 2> infer(std::span<const Spec> in) const;
  Tensors reference(std::span<const Tensor> in) const;
  void fields(auto&& on) const {
    forward.fields(on);
    on("needs", needs);
  }
  bool operator==(const LossTotalGrad&) const = default;
};

}  // namespace ops
}  // namespace sherd
