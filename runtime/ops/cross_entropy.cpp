#include "runtime/ops/cross_entropy.h"

#include "runtime/apply.h"
#include "runtime/cpu/softmax.h"

namespace sherd {
namespace ops {
namespace {

DType compute_dtype(DType d) { return d == DType::f64 ? DType::f64 : DType::f32; }

}  // namespace

Specs CrossEntropy::infer(SpecSpan in) const {
  const Spec &logits = in[0], &targets = in[1];
  check<DTypeError>(is_floating(logits.dtype),
                    "cross_entropy: takes floating logits, got {}; cast them first", name_of(logits.dtype));
  check<DTypeError>(targets.dtype == DType::i64, "cross_entropy: targets must be i64, got {}",
                    name_of(targets.dtype));
  check<ShapeError>(logits.shape.rank() == 2 && targets.shape == Shape{logits.shape[0]},
                    "cross_entropy: logits (n, classes) and targets (n), got {} and {}", logits.shape,
                    targets.shape);
  const Shape loss = reduction == Reduction::none ? targets.shape : Shape{};
  const DType wide = compute_dtype(logits.dtype);
  return {
      {loss, logits.dtype, logits.device}, {targets.shape, wide, logits.device}, {{}, wide, logits.device}};
}

void CrossEntropy::run(Cpu, Inputs in, Outputs out) const {
  const Tensor logits = contiguous(in[0]), targets = contiguous(in[1]);
  const std::int64_t rows = logits.shape()[0], columns = logits.shape()[1];
  dispatch_floating(name, logits.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = compute_t<T>;
    const Tensor row_loss = empty({rows}, {dtype_of<C>});
    auto* loss = static_cast<C*>(row_loss.storage().data());
    const std::int64_t* target = targets.data<std::int64_t>();
    const std::int64_t bad = cpu::cross_entropy(logits.data<T>(), target, ignore_index, rows, columns, loss,
                                                reinterpret_cast<C*>(out[1].raw()));
    check<ValueError>(bad < 0,
                      "cross_entropy: target {} of row {} is outside [0, {}) and is not ignore_index {}",
                      target[std::max<std::int64_t>(bad, 0)], bad, columns, ignore_index);
    double total = 0;
    std::int64_t count = 0;
    auto* y = reinterpret_cast<T*>(out[0].raw());
    for (std::int64_t i = 0; i < rows; ++i) {
      total += loss[i];
      count += target[i] != ignore_index;
      if (reduction == Reduction::none) y[i] = static_cast<T>(loss[i]);
    }
    *reinterpret_cast<C*>(out[2].raw()) = static_cast<C>(count);
    if (reduction == Reduction::mean) total /= static_cast<double>(count);
    if (reduction != Reduction::none) *y = static_cast<T>(static_cast<C>(total));
  });
}

Tensors CrossEntropy::grad(const GradArgs& args) const {
  if (args.create_graph) return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Tensor in[] = {args.gy[0], args.inputs[0], args.inputs[1], args.outputs[1], args.outputs[2]};
  return {apply_many(CrossEntropyGrad{*this}, in)[0], Tensor{}};
}

Tensors CrossEntropy::reference(Inputs in) const {
  const Tensor &logits = in[0], &targets = in[1];
  const std::int64_t columns = logits.shape()[1];
  const Device device = logits.device();
  const Tensor counted = not_equal(targets, static_cast<double>(ignore_index));
  const Tensor classes = arange(0, static_cast<double>(columns), 1, {DType::i64, device});
  const Tensor chosen = equal(unsqueeze(targets, 1), unsqueeze(classes, 0));
  const Tensor zero = Tensor::scalar(0, {logits.dtype(), device});
  const Tensor rows =
      neg(sum(where(logical_and(chosen, unsqueeze(counted, 1)), log_softmax(logits), zero), {1}));
  if (reduction == Reduction::none) return {rows};
  const Tensor total = sum(rows);
  return {reduction == Reduction::sum ? total : div(total, to(sum(counted), logits.dtype()))};
}

void CrossEntropyGrad::run(Cpu, Inputs in, Outputs out) const {
  if (out[0].numel() == 0) return;
  const Tensor gy = contiguous(in[0]), logits = contiguous(in[1]), targets = contiguous(in[2]);
  dispatch_floating(name, logits.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = compute_t<T>;
    const bool each = forward.reduction == Reduction::none;
    const Tensor row_scale = each ? to(gy, dtype_of<C>) : Tensor{};
    C scale = each ? C(1) : static_cast<C>(*gy.data<T>());
    if (forward.reduction == Reduction::mean) scale /= *in[4].data<C>();
    cpu::cross_entropy_backward(logits.data<T>(), targets.data<std::int64_t>(), forward.ignore_index,
                                in[3].data<C>(), scale, each ? row_scale.data<C>() : nullptr,
                                logits.shape()[0], logits.shape()[1], reinterpret_cast<T*>(out[0].raw()));
  });
}

}  // namespace ops

Tensor cross_entropy(const Tensor& logits, const Tensor& targets, CrossEntropyOptions options) {
  const Tensor in[] = {logits, targets};
  return apply_many(ops::CrossEntropy{options.reduction, options.ignore_index}, in)[0];
}

}  // namespace sherd
