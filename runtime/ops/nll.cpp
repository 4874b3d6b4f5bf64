#include "runtime/ops/nll.h"

#include "runtime/apply.h"
#include "runtime/indexing.h"

namespace sherd::ops {
namespace {

/// What each row counts: its target's weight, and 0 where that is ignored.
struct Counts {
  Tensor target, counts;
};
Counts counts_of(const Nll& op, const Tensor& targets, const Tensor& weight, DType wide) {
  if (weight.defined() && weight.numel() == 0)  // without classes every row is ignored
    return {zeros(targets.shape(), {DType::i64, targets.device()}),
            zeros(targets.shape(), {wide, targets.device()})};
  const Tensor counted = not_equal(targets, op.ignore_index), target = where(counted, targets, 0);
  const Tensor ones = expand(Tensor::scalar(1, {wide, targets.device()}), target.shape());
  return {target, where(counted, weight.defined() ? index_select(weight, 0, target) : ones, 0)};
}

}  // namespace

Specs Nll::infer(SpecSpan in) const {
  const Spec &scores = in[0], &targets = in[1], &weight = in[2];
  check<DTypeError>(is_floating(scores.dtype), "{}: takes floating log-probabilities, got {}", call,
                    name_of(scores.dtype));
  check<DTypeError>(targets.dtype == DType::i64, "{}: targets must be class numbers in i64, got {}", call,
                    name_of(targets.dtype));
  check<ShapeError>(scores.shape.rank() == 2 && targets.shape == Shape{scores.shape[0]},
                    "{}: log-probabilities (n, classes) and targets (n), got {} and {}", call, scores.shape,
                    targets.shape);
  const DType wide = compute_dtype(scores.dtype);
  if (!weight.shape.is_none()) {
    check<ShapeError>(weight.shape == Shape{scores.shape[1]}, "{}: weights of shape {} for {} classes", call,
                      weight.shape, scores.shape[1]);
    check<DTypeError>(weight.dtype == wide, "{}: weights in {} beside {}; they must be {}", call,
                      name_of(weight.dtype), name_of(scores.dtype), name_of(wide));
  }
  return {{reduction == Reduction::none ? targets.shape : Shape{}, scores.dtype, scores.device},
          {{}, wide, scores.device}};
}

Tensors Nll::grad(const GradArgs& args) const {
  if (!args.gy[0].defined() && !args.need(2)) return Tensors(3);
  if (args.create_graph || args.need(2))
    return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Spec& scores = args.specs[0];
  const Tensor in[] = {args.gy[0], args.inputs[1], args.outputs[1], args.inputs[2]};
  return {apply_many(NllGrad{*this, scores.shape[1], scores.dtype}, in)[0], Tensor{}, Tensor{}};
}

Tensors Nll::reference(Inputs in) const {
  const Tensor& scores = in[0];
  const DType wide = compute_dtype(scores.dtype());
  const auto [target, counts] = counts_of(*this, in[1], in[2], wide);
  const bool classes = scores.shape()[1] > 0;  // without any, every row is ignored
  const Tensor chosen = classes ? squeeze(gather(scores, unsqueeze(target, 1)), 1) : sum(scores, {1});
  // A row that does not count may hold an infinity: 0 times that would be NaN.
  const Tensor rows = where(not_equal(in[1], ignore_index), neg(mul(to(chosen, wide), counts)), 0);
  const Tensor total = sum(counts);
  Tensor loss = rows;
  if (reduction != Reduction::none) loss = sum(rows);
  if (reduction == Reduction::mean) loss = div(loss, total);
  return {to(loss, scores.dtype()), total};
}

Tensors NllGrad::reference(Inputs in) const {
  const Tensor &gy = in[0], &total = in[2];
  const auto [target, counts] = counts_of(forward, in[1], in[3], total.dtype());
  Tensor scale = neg(to(gy, total.dtype()));
  if (forward.reduction == Reduction::mean) scale = div(scale, total);
  const Tensor factors = where(not_equal(in[1], forward.ignore_index), mul(counts, scale), 0);
  const Tensor none = zeros({target.shape()[0], classes}, {dtype, gy.device()});
  if (classes == 0) return {none};
  return {scatter(none, 1, unsqueeze(target, 1), unsqueeze(to(factors, dtype), 1))};
}

}  // namespace sherd::ops
