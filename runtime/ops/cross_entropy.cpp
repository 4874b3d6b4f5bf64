#include "runtime/ops/cross_entropy.h"

#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/given.h"

namespace sherd {
namespace ops {
namespace {

/// bool (n, classes): where a row's target is.
Tensor chosen_classes(const Tensor& targets, std::int64_t classes) {
  const Tensor all = arange(0, classes, 1, {DType::i64, targets.device()});
  return equal(unsqueeze(targets, 1), unsqueeze(all, 0));
}

}  // namespace

Specs CrossEntropy::infer(SpecSpan in) const {
  const Spec &logits = in[0], &targets = in[1];
  check<DTypeError>(is_floating(logits.dtype),
                    "cross_entropy: takes floating logits, got {}; cast them first", name_of(logits.dtype));
  check<DTypeError>(targets.dtype == DType::i64,
                    "cross_entropy: targets must be class numbers in i64, got {}; cast them first",
                    name_of(targets.dtype));
  check<ShapeError>(logits.shape.rank() == 2 && targets.shape == Shape{logits.shape[0]},
                    "cross_entropy: logits (n, classes) and targets (n), got {} and {}", logits.shape,
                    targets.shape);
  const Shape loss = reduction == Reduction::none ? targets.shape : Shape{};
  const DType wide = compute_dtype(logits.dtype);
  const DType narrow = precision == LossPrecision::wide ? wide : logits.dtype;
  return {
      {loss, narrow, logits.device}, {{2, targets.shape[0]}, wide, logits.device}, {{}, wide, logits.device}};
}

Tensors CrossEntropy::grad(const GradArgs& args) const {
  if (args.create_graph) return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Tensor in[] = {args.gy[0], args.inputs[0], args.inputs[1], args.outputs[1], args.outputs[2]};
  return {has(args.beside.spare.inputs, 0) ? apply_many(CrossEntropyGradInPlace{{*this}}, in)[0]
                                           : apply_many(CrossEntropyGrad{*this}, in)[0],
          Tensor{}};
}

Tensors CrossEntropy::reference(Inputs in) const {
  const Tensor &targets = in[1], counted = not_equal(targets, ignore_index);
  const Tensor given = detail::to_compute_dtype(in[0]);
  // An ignored row's numbers are not used, whatever they are: 0 times infinity would be.
  const Tensor logits = masked_fill(given, unsqueeze(logical_not(counted), 1), 0);
  const Tensor top = amax(logits, {1}, Keep::dims).detach();
  const Tensor below = sub(logits, top), logs = log(sum(exp(below), {1}));
  const Tensor zero = Tensor::scalar(0, {logits.dtype(), logits.device()});
  const Tensor chosen = sum(where(chosen_classes(targets, logits.shape()[1]), below, zero), {1});
  const Tensor rows = where(counted, sub(logs, chosen), zero);
  const Tensor count = to(sum(counted), logits.dtype());
  Tensor loss = rows;
  if (reduction != Reduction::none) loss = sum(rows);
  if (reduction == Reduction::mean) loss = div(loss, count);
  return {precision == LossPrecision::wide ? loss : to(loss, in[0].dtype()), stack({squeeze(top, 1), logs}),
          count};
}

Tensors CrossEntropyGrad::reference(Inputs in) const {
  const Tensor &logits = in[1], &targets = in[2], &normalizers = in[3];
  Tensor scale = to(in[0], normalizers.dtype());
  if (forward.reduction == Reduction::mean) scale = div(scale, in[4]);
  const Tensor zero = Tensor::scalar(0, {scale.dtype(), scale.device()});
  const Tensor counted = not_equal(targets, forward.ignore_index), rows = where(counted, scale, zero);
  const auto column = [&](std::int64_t i) { return unsqueeze(select(normalizers, 0, i), 1); };
  const Tensor softmax = exp(sub(sub(to(logits, scale.dtype()), column(0)), column(1)));
  const Tensor chosen = to(chosen_classes(targets, logits.shape()[1]), scale.dtype());
  const Tensor g = mul(sub(softmax, chosen), unsqueeze(rows, 1));
  return {to(masked_fill(g, unsqueeze(logical_not(counted), 1), 0), logits.dtype())};
}

Specs CrossEntropyInPlace::infer(SpecSpan in) const {
  check<ValueError>(
      forward.reduction != Reduction::none,
      "cross_entropy_: needs one loss, a mean or a sum, to write the gradient of; call cross_entropy");
  return {forward.infer(in)[0]};
}

void CrossEntropyInPlace::run(Inputs in, Outputs out) const {
  const Tensor logits = in[0];
  Tensor results[] = {out[1], empty({2, logits.shape()[0]}, {compute_dtype(logits.dtype()), logits.device()}),
                      empty({}, {compute_dtype(logits.dtype()), logits.device()})};
  run_again(OpModel<CrossEntropy>(forward), in, results);
  const Tensor one = ones({}, {out[1].dtype(), logits.device()});
  const Tensor back[] = {one, logits, in[1], results[1], results[2]};
  Tensor over[] = {logits};
  run_again(OpModel<CrossEntropyGradInPlace>(CrossEntropyGradInPlace{{forward}}), back, over);
}

Tensors CrossEntropyInPlace::grad(const GradArgs& args) const {
  check<NotImplementedError>(
      !args.create_graph,
      "cross_entropy_: its logits are gone, so it has no second derivative; call cross_entropy");
  check<StateError>(
      !args.gy[0].defined(),
      "cross_entropy_: something was computed from the logits that it wrote over; call cross_entropy");
  Tensors grads(2);
  if (!args.gy[1].defined()) return grads;
  const Tensor &gradient = args.outputs[0], &scale = args.gy[1];
  const Tensor in[] = {has(args.beside.spare.outputs, 0) ? gradient : clone(gradient), scale};
  grads[0] = apply_many(ScaleUnlessOne{}, in)[0];
  return grads;
}

Specs ScaleUnlessOne::infer(SpecSpan in) const {
  check<ShapeError>(in[1].shape.rank() == 0, "scale_unless_one_: the factor must be 0-d, got shape {}",
                    in[1].shape);
  check<DTypeError>(is_floating(in[0].dtype) && (in[1].dtype == in[0].dtype || in[1].dtype == DType::f32),
                    "scale_unless_one_: {} by {}; the factor must be of that dtype or f32",
                    name_of(in[0].dtype), name_of(in[1].dtype));
  return {};
}

Tensors ScaleUnlessOne::reference(Inputs in) const {
  const DType wide = compute_dtype(in[0].dtype());
  return {to(mul(to(in[0], wide), to(in[1], wide)), in[0].dtype())};
}

}  // namespace ops

Tensor cross_entropy_(const Tensor& logits, const Tensor& targets, CrossEntropyOptions options) {
  detail::check_given("cross_entropy_", logits, targets);
  check<NotImplementedError>(
      options.label_smoothing == 0 && !options.weight.defined(),
      "cross_entropy_: takes no label smoothing ({}) and no weights; call cross_entropy",
      options.label_smoothing);
  const Tensor in[] = {logits, targets};
  return apply_many(ops::CrossEntropyInPlace{{options.reduction, options.ignore_index, options.precision}},
                    in)[1];
}

}  // namespace sherd
