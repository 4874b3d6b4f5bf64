#include "runtime/ops/batch_norm.h"

#include <algorithm>
#include <array>

#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/elementwise.h"
#include "runtime/given.h"
#include "runtime/in_parts.h"
#include "runtime/ops.h"
#include "runtime/ops/relu.h"

namespace sherd {
namespace ops {
namespace {

DType wide(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

/// Elements that share a channel.
std::int64_t elements_per_channel(const Shape& shape) {
  std::int64_t n = shape[0];
  for (int i = 2; i < shape.rank(); ++i) n *= shape[i];
  return n;
}

void check_affine(const Spec& x, const Spec& p, std::string_view what) {
  check<DTypeError>(p.dtype == x.dtype || p.dtype == wide(x.dtype),
                    "batch_norm: input is {} and its {} {}; cast one of them", name_of(x.dtype), what,
                    name_of(p.dtype));
  check<ShapeError>(p.shape == Shape{x.shape[1]}, "batch_norm: {} of shape {} for {} channels", what, p.shape,
                    x.shape[1]);
}

void check_statistics(const Spec& x, const Spec& s, std::string_view what) {
  check<DTypeError>(is_floating(s.dtype), "batch_norm: {} must be floating, got {}", what, name_of(s.dtype));
  check<ShapeError>(s.shape == Shape{x.shape[1]}, "batch_norm: {} of shape {} for {} channels", what, s.shape,
                    x.shape[1]);
}

void check_residual(const Spec& x, const Spec& residual) {
  check<DTypeError>(residual.dtype == x.dtype,
                    "batch_norm: input is {} and its residual {}; cast one of them", name_of(x.dtype),
                    name_of(residual.dtype));
  check<ShapeError>(residual.shape == x.shape, "batch_norm: residual of shape {} for an input of shape {}",
                    residual.shape, x.shape);
}

/// The rule of CUDA's backward, which programs rely on: with axes beyond the channels, the running statistics
/// have the weight's precision.
void check_precision(SpecSpan in) {
  const Spec &x = in[0], &weight = in[1], &mean = in[3];
  if (x.shape.rank() <= 2 || mean.is_none()) return;
  const DType expected = weight.is_none() ? x.dtype : weight.dtype;
  check<DTypeError>(
      mean.dtype == expected,
      "Expected running_mean to have type {} but got {} (batch_norm of {}, {} beside {}): cast the "
      "running statistics, or keep the weight in their dtype",
      long_name_of(expected), long_name_of(mean.dtype), x.shape, expected, mean.dtype);
}

/// The op without residual and ReLU, in other ops.
Tensors normalised(const BatchNorm& op, Inputs in) {
  const Tensor x = to(in[0], wide(in[0].dtype()));
  Shape others{0}, column{x.shape()[1]};
  for (int i = 2; i < x.rank(); ++i) {
    others.push_back(i);
    column.push_back(1);
  }
  const auto along = [&](const Tensor& t) { return reshape(to(t, x.dtype()), column); };
  const Tensor mean = op.training ? sherd::mean(x, others, Keep::dims) : along(in[3].detach());
  const Tensor centred = sub(x, mean);
  const Tensor variance =
      op.training ? sherd::mean(square(centred), others, Keep::dims) : along(in[4].detach());
  Tensor y = mul(centred, rsqrt(add(variance, op.eps)));
  if (in[1].defined()) y = mul(y, along(in[1]));
  if (in[2].defined()) y = add(y, along(in[2]));
  const Shape channels{x.shape()[1]};
  return {to(y, in[0].dtype()), reshape(mean, channels), reshape(variance, channels)};
}

constexpr std::size_t residual_at = 5;

/// The gradient of what ReLU is taken of.
Tensor before_relu(const Tensor& gy, const Tensor& y) { return apply(ElementwiseGrad<Relu, 0>{}, gy, y); }

/// Gradients that are recorded: of the reference, but that ReLU's reads y, so that no residual is kept.
Tensors recorded_gradients(const BatchNorm& op, const GradArgs& args) {
  const Tensor gy[] = {op.relu ? before_relu(args.gy[0], args.outputs[0]) : args.gy[0], args.gy[1],
                       args.gy[2]};
  GradArgs of_norm = args;
  of_norm.gy = gy;
  of_norm.inputs = args.inputs.first(residual_at);
  of_norm.specs = args.specs.first(residual_at);
  Tensors grads = detail::reference_gradient(of_norm, [&](Inputs in) { return normalised(op, in); });
  grads.push_back(args.need(residual_at) ? gy[0] : Tensor());
  return grads;
}

}  // namespace

/// Running statistics of a training step may change before its backward.
Reads BatchNorm::reads(Mask needs) const {
  const Reads of_relu{0, relu ? Mask{1} : Mask{0}};
  if ((needs & 0b111) == 0) return of_relu;
  return Reads{training ? Mask{0b00111} : Mask{0b11111}, 0b110} | of_relu;
}

Specs BatchNorm::infer(SpecSpan in) const {
  const Spec& x = in[0];
  check<DTypeError>(is_floating(x.dtype), "batch_norm: takes floating dtypes, got {}; cast the input first",
                    name_of(x.dtype));
  check<ValueError>(eps >= 0, "batch_norm: eps {} is below 0", eps);
  check<ShapeError>(x.shape.rank() >= 2, "batch_norm: an input (N, C, ...), got shape {}", x.shape);
  if (!in[1].is_none()) check_affine(x, in[1], "weight");
  if (!in[2].is_none()) check_affine(x, in[2], "bias");
  if (!in[3].is_none()) check_statistics(x, in[3], "running_mean");
  if (!in[4].is_none()) check_statistics(x, in[4], "running_var");
  if (!in[5].is_none()) check_residual(x, in[5]);
  check<ValueError>(in[3].is_none() == in[4].is_none(),
                    "batch_norm: running_mean and running_var come together or not at all");
  check<ValueError>(training || !in[3].is_none(),
                    "batch_norm: without running statistics there is only training mode");
  check<ValueError>(
      !training || elements_per_channel(x.shape) != 1,
      "batch_norm: expected more than 1 value per channel when training, got shape {}; use {}", x.shape,
      in[3].is_none() ? "a larger batch, whose own statistics count in either mode where none are kept"
                      : "eval mode or a larger batch");
  const Spec statistics{{x.shape[1]}, wide(x.dtype), x.device};
  return {x, statistics, statistics};
}

Tensors BatchNorm::grad(const GradArgs& args) const {
  Tensors grads(residual_at + 1);
  if (!args.need(0) && !args.need(1) && !args.need(2)) {
    if (args.need(residual_at))
      grads[residual_at] = relu ? before_relu(args.gy[0], args.outputs[0]) : args.gy[0];
    return grads;
  }
  if (training) check_precision(args.specs);
  if (args.create_graph) return recorded_gradients(*this, args);
  const Tensor in[] = {args.gy[0],      args.inputs[0],
                       args.inputs[1],  args.outputs[1],
                       args.outputs[2], relu ? args.outputs[0] : Tensor(),
                       args.inputs[2],  {}};
  const bool of_residual = relu && args.need(residual_at),
             of_inputs = relu && args.specs[residual_at].is_none();
  const Tensors made = apply_many(BatchNormGrad{training, eps, of_residual, of_inputs}, in);
  for (std::size_t i = 0; i < 3; ++i)
    if (args.need(i)) grads[i] = to(made[i], args.specs[i].dtype);
  if (args.need(residual_at)) grads[residual_at] = of_residual ? made[3] : args.gy[0];
  return grads;
}

Tensors BatchNorm::reference(Inputs in) const {
  Tensors out = normalised(*this, in);
  if (in[residual_at].defined()) out[0] = add(out[0], in[residual_at]);
  if (relu) out[0] = sherd::relu(out[0]);
  return out;
}

Specs BatchNormGrad::infer(SpecSpan in) const {
  Specs out{in[1], in[3], in[3]};
  if (of_residual) out.push_back(in[1]);
  return out;
}

Tensors BatchNormGrad::reference(Inputs in) const {
  const DType wide = in[3].dtype();
  Shape others{0}, column{in[1].shape()[1]};
  for (int i = 2; i < in[1].rank(); ++i) {
    others.push_back(i);
    column.push_back(1);
  }
  const auto along = [&](const Tensor& t) { return reshape(to(t, wide), column); };
  const Tensor whole = in_one({first_part, second_part}, in),
               of_norm = in[5].defined() ? before_relu(whole, in[5]) : whole;
  const Tensor gy = to(of_norm, wide), rstd = rsqrt(add(along(in[4]), eps));
  const Tensor normal = mul(sub(to(in[1], wide), along(in[3])), rstd);
  const Tensor g_weight = sum(mul(gy, normal), others, Keep::dims), g_bias = sum(gy, others, Keep::dims);
  Tensor g = gy;
  if (training) {
    const double n = static_cast<double>(std::max<std::int64_t>(elements_per_channel(in[1].shape()), 1));
    g = sub(sub(gy, div(g_bias, n)), mul(normal, div(g_weight, n)));
  }
  if (in[2].defined()) g = mul(g, along(in[2]));
  const Shape channels{in[1].shape()[1]};
  Tensors out{to(mul(g, rstd), in[1].dtype()), reshape(g_weight, channels), reshape(g_bias, channels)};
  if (of_residual) out.push_back(of_norm);
  return out;
}

Specs RunningStatistics::infer(SpecSpan in) const {
  for (const Spec& s : in) {
    check<DTypeError>(is_floating(s.dtype), "{}: statistics of {}; they are floating-point", name,
                      name_of(s.dtype));
    check<ShapeError>(s.shape == in[0].shape && s.shape.rank() == 1,
                      "{}: statistics of shapes {} and {}; all are one for each channel", name, in[0].shape,
                      s.shape);
  }
  check<DTypeError>(in[1].dtype == wide(in[1].dtype),
                    "{}: a mean of {}; statistics of a batch are f32 or f64", name, name_of(in[1].dtype));
  for (const std::size_t i : {0, 1})
    check<DTypeError>(in[i].dtype == in[i + 2].dtype, "{}: a {} of {} beside a variance of {}", name,
                      i == 0 ? "running mean" : "mean", name_of(in[i].dtype), name_of(in[i + 2].dtype));
  return {};
}

Tensors RunningStatistics::reference(Inputs in) const {
  const auto moved = [&](std::size_t i, double factor) {
    const Tensor &running = in[i], &batch = in[i + 1];
    const Tensor kept = mul(to(running, batch.dtype()), 1 - momentum);
    return to(add(kept, mul(batch, momentum * factor)), running.dtype());
  };
  return {moved(0, 1), moved(2, unbiased)};
}

bool RunningStatistics::moved_others(Inputs in) const {
  if (std::ranges::all_of(in, [](const Tensor& t) { return t.is_contiguous(); })) return false;
  const Tensors moved = reference(in);
  for (const std::size_t i : {0, 1}) copy_(alias(in[2 * i], in[2 * i].layout()), moved[i]);
  return true;
}

}  // namespace ops

Tensor batch_norm(const Tensor& x, const Tensor& running_mean, const Tensor& running_var,
                  const Tensor& weight, const Tensor& bias, BatchNormOptions options) {
  detail::check_given("batch_norm", x);
  check<ValueError>(options.momentum >= 0 && options.momentum <= 1,
                    "batch_norm: momentum {} is outside [0, 1]", options.momentum);
  const Tensor in[] = {x, weight, bias, running_mean, running_var, options.residual};
  const bool relu = options.activation == Activation::relu;
  const Tensors out = apply_many(ops::BatchNorm{options.training, options.eps, relu}, in);
  if (options.training && running_mean.defined() && x.numel() > 0) {
    const NoGrad guard;
    const auto n = static_cast<double>(x.numel() / x.shape()[1]);
    apply_many(ops::RunningStatistics{options.momentum, n / (n - 1)},
               std::array{running_mean, out[1], running_var, out[2]});
  }
  return options.activation == Activation::gelu ? gelu(out[0]) : out[0];
}

}  // namespace sherd
