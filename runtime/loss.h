// What turns a loss of one element, an elementwise op of input and target, into the loss of tensors: its
// checks, its mean and sum in one pass, and what those are in ops, written once for all of them.
#pragma once

#include <functional>
#include <string_view>

#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/losses.h"
#include "runtime/ops/loss_total.h"

namespace sherd {
namespace detail {

/// DTypeError unless both have one floating dtype, ShapeError unless they have one shape or one is 0-d.
SHERD_API void check_loss(std::string_view call, const Tensor& input, const Tensor& target);
/// The loss of all elements from that of each, rounded to `dtype` once.
SHERD_API Tensor reduced_loss(const Tensor& loss, Reduction reduction, DType dtype);

SHERD_API Specs infer_total(std::string_view op, DTypeSet dtypes, SpecSpan in);
SHERD_API Specs infer_total_grad(Mask needs, SpecSpan in);
/// The total by `loss`, which gives that of each element in the dtype that is computed in.
SHERD_API Tensor total_in_ops(Inputs in, bool mean, const std::function<Tensor(Inputs)>& loss);
/// Gradients of a total by `grad`, from what to give of them and gy, input and target.
SHERD_API Tensors grads_of_total(const GradArgs& args, const std::function<Tensors(Mask, Inputs)>& grad);
/// The same in ops by `grad`, from the number of an input and gy of each element, input and target.
SHERD_API Tensors total_grads_in_ops(Inputs in, bool mean, Mask needs,
                                     const std::function<Tensor(std::size_t, Inputs)>& grad);

/// The gradient of input `I` element by element, of gy, input and target.
template <int I, class Loss>
Tensor loss_gradient_in_ops(const Loss& loss, Inputs in) {
  if constexpr (((identity_grads<Loss>() >> I) & 1) != 0) {
    return in[0];
  } else {
    constexpr Reads kept = reads_of<Loss, I>();
    Tensors read{in[0]};
    for (const std::size_t k : {0, 1})
      if (has(kept.inputs, k)) read.push_back(in[1 + k]);
    if constexpr (has(kept.outputs, 0)) read.push_back(apply(loss, in[1], in[2]));
    return apply_many(ElementwiseGrad<Loss, I>{loss}, Inputs(read.begin(), read.size()))[0];
  }
}

/// `call` is what messages name.
template <ElementwiseLoss Loss>
Tensor elementwise_loss(std::string_view call, const Loss& loss, const Tensor& input, const Tensor& target,
                        Reduction reduction) {
  check_loss(call, input, target);
  if (reduction == Reduction::none) return apply(loss, input, target);
  if (input.shape() == target.shape())
    return apply(ops::LossTotal<Loss>{loss, reduction == Reduction::mean}, input, target);
  return reduced_loss(apply(loss, to_compute_dtype(input), to_compute_dtype(target)), reduction,
                      input.dtype());
}

}  // namespace detail

/// A loss of one's own over `input` and `target`, as `mse_loss` is that of `ops::SquaredError`: its mean or
/// sum in one pass, and so their gradients. One shape (ShapeError) unless one is 0-d; floats of one dtype
/// (DTypeError), those of 16 bits summed in f32 and rounded once. Once before it is used:
/// `cpu::add_loss<MyLoss>()`, and for a GPU `cuda::add_loss<MyLoss>()` (runtime/cuda/loss_total.cuh).
template <ElementwiseLoss Loss>
Tensor elementwise_loss(const Loss& loss, const Tensor& input, const Tensor& target,
                        Reduction reduction = Reduction::mean) {
  return detail::elementwise_loss(Loss::name, loss, input, target, reduction);
}

namespace ops {

template <ElementwiseLoss Loss>
Specs LossTotal<Loss>::infer(SpecSpan in) const {
  return sherd::detail::infer_total(name, Loss::dtypes, in);
}

template <ElementwiseLoss Loss>
Tensors LossTotal<Loss>::reference(Inputs in) const {
  return {
      sherd::detail::total_in_ops(in, mean, [this](Inputs wide) { return apply(loss, wide[0], wide[1]); })};
}

template <ElementwiseLoss Loss>
Tensors LossTotal<Loss>::grad(const GradArgs& args) const {
  if (args.create_graph)
    return sherd::detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  return sherd::detail::grads_of_total(
      args, [this](Mask needs, Inputs in) { return apply_many(LossTotalGrad<Loss>{*this, needs}, in); });
}

template <ElementwiseLoss Loss>
Specs LossTotalGrad<Loss>::infer(SpecSpan in) const {
  return sherd::detail::infer_total_grad(needs, in);
}

template <ElementwiseLoss Loss>
Tensors LossTotalGrad<Loss>::reference(Inputs in) const {
  return sherd::detail::total_grads_in_ops(in, forward.mean, needs, [this](std::size_t i, Inputs each) {
    return i == 0 ? sherd::detail::loss_gradient_in_ops<0>(forward.loss, each)
                  : sherd::detail::loss_gradient_in_ops<1>(forward.loss, each);
  });
}

}  // namespace ops
}  // namespace sherd
