#include "runtime/ops/cross_entropy.h"

#include "runtime/apply.h"

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
  return {{loss, narrow, logits.device}, {targets.shape, wide, logits.device}, {{}, wide, logits.device}};
}

Tensors CrossEntropy::grad(const GradArgs& args) const {
  if (args.create_graph) return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Tensor in[] = {args.gy[0], args.inputs[0], args.inputs[1], args.outputs[1], args.outputs[2]};
  return {has(args.spare, 0) ? apply_many(CrossEntropyGradInPlace{{*this}}, in)[0]
                             : apply_many(CrossEntropyGrad{*this}, in)[0],
          Tensor{}};
}

Tensors CrossEntropy::reference(Inputs in) const {
  const Tensor &targets = in[1], counted = not_equal(targets, ignore_index);
  const Tensor given = to(in[0], compute_dtype(in[0].dtype()));
  // An ignored row's numbers are not used, whatever they are: 0 times infinity would be.
  const Tensor logits = masked_fill(given, unsqueeze(logical_not(counted), 1), 0);
  const Tensor top = amax(logits, {1}, Keep::dims).detach();
  const Tensor logsumexp = add(log(sum(exp(sub(logits, top)), {1})), squeeze(top, 1));
  const Tensor zero = Tensor::scalar(0, {logits.dtype(), logits.device()});
  const Tensor chosen = sum(where(chosen_classes(targets, logits.shape()[1]), logits, zero), {1});
  const Tensor rows = where(counted, sub(logsumexp, chosen), zero);
  const Tensor count = to(sum(counted), logits.dtype());
  Tensor loss = rows;
  if (reduction != Reduction::none) loss = sum(rows);
  if (reduction == Reduction::mean) loss = div(loss, count);
  return {precision == LossPrecision::wide ? loss : to(loss, in[0].dtype()), logsumexp, count};
}

Tensors CrossEntropyGrad::reference(Inputs in) const {
  const Tensor &logits = in[1], &targets = in[2], &logsumexp = in[3];
  Tensor scale = to(in[0], logsumexp.dtype());
  if (forward.reduction == Reduction::mean) scale = div(scale, in[4]);
  const Tensor zero = Tensor::scalar(0, {scale.dtype(), scale.device()});
  const Tensor counted = not_equal(targets, forward.ignore_index), rows = where(counted, scale, zero);
  const Tensor softmax = exp(sub(to(logits, scale.dtype()), unsqueeze(logsumexp, 1)));
  const Tensor chosen = to(chosen_classes(targets, logits.shape()[1]), scale.dtype());
  const Tensor g = mul(sub(softmax, chosen), unsqueeze(rows, 1));
  return {to(masked_fill(g, unsqueeze(logical_not(counted), 1), 0), logits.dtype())};
}

}  // namespace ops

Tensor cross_entropy(const Tensor& logits, const Tensor& targets, CrossEntropyOptions options) {
  const Tensor in[] = {logits, targets};
  return apply_many(ops::CrossEntropy{options.reduction, options.ignore_index, options.precision}, in)[0];
}

}  // namespace sherd
