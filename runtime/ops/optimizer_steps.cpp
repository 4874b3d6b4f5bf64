#include "runtime/ops/optimizer_steps.h"

#include <vector>

#include "runtime/apply.h"
#include "runtime/exact_squares.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {
namespace {

/// The f32 tensors of one parameter have one shape; the gradient may not have another.
void check_parameter(std::string_view op, const Spec& p, const Spec& other, std::string_view what) {
  check<DTypeError>(
      p.dtype == DType::f32 && other.dtype == DType::f32,
      "{}: parameters, gradients and state must be f32, got a {} parameter with a {} {}; keep f32 masters",
      op, name_of(p.dtype), name_of(other.dtype), what);
  check<ShapeError>(p.shape == other.shape, "{}: a parameter of shape {} has a {} of shape {}", op, p.shape,
                    what, other.shape);
}

void check_floating(std::string_view op, const Spec& s) {
  check<DTypeError>(is_floating(s.dtype), "{}: takes floating tensors, got {}; cast it", op,
                    name_of(s.dtype));
}

void check_scalar(std::string_view op, std::string_view what, const Spec& s) {
  check<DTypeError>(s.dtype == DType::f64 && s.shape.rank() == 0,
                    "{}: {} must be a 0-d f64 tensor, got {} {}", op, what, name_of(s.dtype), s.shape);
}

/// Of a step that takes one.
void check_skip(std::string_view op, Skippable skippable, SpecSpan in) {
  if (skippable == Skippable::no) return;
  check<ValueError>(in.size() > 1, "{}: a skippable step takes a flag after the rate, got no second input",
                    op);
  check<DTypeError>(in[1].dtype == DType::f32 && in[1].shape.rank() == 0,
                    "{}: the flag must be a 0-d f32 tensor, got {} {}", op, name_of(in[1].dtype),
                    in[1].shape);
}

/// Of a step that takes one: it comes last before the parameters.
void check_factor(std::string_view op, Clipped clipped, std::size_t first, SpecSpan in) {
  if (clipped == Clipped::no) return;
  check<ValueError>(in.size() >= first,
                    "{}: a clipped step takes a factor before the parameters, got {} inputs", op, in.size());
  check_scalar(op, "the factor", in[first - 1]);
}

/// A 16-bit tensor of the parameter's shape.
void check_narrow(std::string_view op, const Spec& p, const Spec& other, std::string_view what) {
  check<DTypeError>(is_floating(other.dtype) && size_of(other.dtype) == 2,
                    "{}: a parameter's {} must be bf16 or f16, got {}", op, what, name_of(other.dtype));
  check<ShapeError>(p.shape == other.shape, "{}: a parameter of shape {} has a {} of shape {}", op, p.shape,
                    what, other.shape);
}

/// It may have 16 bits where the parameter has not.
void check_gradient(std::string_view op, const Spec& p, Spec gradient) {
  const bool narrow = is_floating(gradient.dtype) && size_of(gradient.dtype) == 2;
  if (narrow && p.dtype == DType::f32) gradient.dtype = DType::f32;
  check_parameter(op, p, gradient, "gradient");
}

/// Input `i`, a gradient, as the step takes it.
template <class Op>
Tensor gradient(const Op& op, Inputs in, std::size_t i) {
  if (op.clipped == Clipped::no) return in[i];
  return to(mul(to(in[i], DType::f64), in[op.first() - 1]), in[i].dtype());
}

/// What is written unless the step is skipped.
Tensors unless_skipped(Skippable skippable, Inputs in, std::span<const Tensor> before, Tensors after) {
  if (skippable == Skippable::no) return after;
  const Tensor skipped = not_equal(in[1], 0);
  for (std::size_t i = 0; i < after.size(); ++i) after[i] = where(skipped, before[i], after[i]);
  return after;
}

/// A list of parameters that ends in the middle of one would be read past its end.
void check_whole(std::string_view op, std::size_t tensors, std::size_t each) {
  check<ValueError>(tensors % each == 0, "{}: {} tensors after the rate, and each parameter brings {}", op,
                    tensors, each);
}

}  // namespace

Specs AdamStep::infer(SpecSpan in) const {
  check_scalar(name, "the rate", in[0]);
  check_skip(name, skippable, in);
  check_factor(name, clipped, first(), in);
  check_whole(name, in.size() - first(), stride());
  for (std::size_t i = first(); i < in.size(); i += stride()) {
    check_gradient(name, in[i], in[i + 1]);
    check_parameter(name, in[i], in[i + 2], "first moment");
    check_parameter(name, in[i], in[i + 3], "second moment");
    check_scalar(name, "a count of steps", in[i + 4]);
    if (twins == Twins::yes) check_narrow(name, in[i], in[i + 5], "twin");
  }
  return {};
}

Specs SgdStep::infer(SpecSpan in) const {
  check_scalar(name, "the rate", in[0]);
  check_skip(name, skippable, in);
  check_factor(name, clipped, first(), in);
  check_whole(name, in.size() - first(), stride());
  for (std::size_t i = first(); i < in.size(); i += stride()) {
    check_gradient(name, in[i], in[i + 1]);
    if (momentum == 0) continue;
    check_parameter(name, in[i], in[i + 2], "momentum buffer");
    check_scalar(name, "a count of steps", in[i + 3]);
  }
  return {};
}

Specs RmspropStep::infer(SpecSpan in) const {
  check_scalar(name, "the rate", in[0]);
  check_skip(name, skippable, in);
  check_factor(name, clipped, first(), in);
  check_whole(name, in.size() - first(), stride());
  for (std::size_t i = first(); i < in.size(); i += stride()) {
    check_gradient(name, in[i], in[i + 1]);
    check_parameter(name, in[i], in[i + 2], "average of squares");
    if (centered) check_parameter(name, in[i], in[i + 3], "average of gradients");
    if (momentum != 0) check_parameter(name, in[i], in[i + stride() - 1], "momentum buffer");
  }
  return {};
}

Specs LargestMagnitude::infer(SpecSpan in) const {
  check<ValueError>(!in.empty(), "{}: needs a tensor, got none", name);
  for (const Spec& s : in) check_floating(name, s);
  return {{{}, DType::f64, in[0].device}};
}

Specs SquareSums::infer(SpecSpan in) const {
  check<ValueError>(!in.empty(), "{}: needs a tensor, got none", name);
  for (const Spec& s : in) check_floating(name, s);
  return {{{ExactSquares::limbs}, DType::i64, in[0].device}};
}

Specs NormOfSums::infer(SpecSpan in) const {
  check<DTypeError>(in[0].dtype == DType::i64, "{}: sums must be i64, got {}", name, name_of(in[0].dtype));
  check<ShapeError>(in[0].shape == Shape{ExactSquares::limbs}, "{}: sums must be of shape ({}), got {}", name,
                    static_cast<int>(ExactSquares::limbs), in[0].shape);
  return {{{}, DType::f64, in[0].device}};
}

Specs ClipScale::infer(SpecSpan in) const {
  check_scalar(name, "the norm", in[0]);
  for (const Spec& s : in.subspan(1)) check_floating(name, s);
  return {};
}

Tensors AdamStep::reference(Inputs in) const {
  const Tensor& lr = in[0];
  Tensors before, out;
  for (std::size_t i = first(); i < in.size(); i += stride()) {
    const auto like_p = [&](const Tensor& t) { return to(t, in[i].dtype()); };
    const Tensor step = add(in[i + 4], 1);
    const Tensor correction1 = sub(1, pow(full({}, beta1, {DType::f64, lr.device()}), step));
    const Tensor correction2 = sub(1, pow(full({}, beta2, {DType::f64, lr.device()}), step));
    Tensor p = in[i], g = like_p(gradient(*this, in, i + 1));
    if (weight_decay != 0 && decoupled) p = mul(p, like_p(sub(1, mul(lr, weight_decay))));
    if (weight_decay != 0 && !decoupled) g = add(g, mul(p, weight_decay));
    const Tensor m = add(mul(in[i + 2], beta1), mul(g, 1 - beta1));
    const Tensor v = add(mul(in[i + 3], beta2), mul(mul(g, g), 1 - beta2));
    const Tensor deviation = add(div(sqrt(v), like_p(sqrt(correction2))), eps);
    p = sub(p, mul(div(m, deviation), like_p(div(lr, correction1))));
    for (const Tensor& written : {p, m, v, step}) out.push_back(written);
    for (const std::size_t k : {0, 2, 3, 4}) before.push_back(in[i + k]);
    if (twins == Twins::no) continue;
    out.push_back(to(p, in[i + 5].dtype()));
    before.push_back(in[i + 5]);
  }
  return unless_skipped(skippable, in, {before.begin(), before.size()}, out);
}

Tensors SgdStep::reference(Inputs in) const {
  Tensors before, out;
  for (std::size_t i = first(); i < in.size(); i += stride()) {
    const Tensor& p = in[i];
    before.push_back(p);
    const Tensor lr = to(in[0], p.dtype());
    Tensor g = to(gradient(*this, in, i + 1), p.dtype());
    if (weight_decay != 0) g = add(g, mul(p, weight_decay));
    if (momentum == 0) {
      out.push_back(sub(p, mul(g, lr)));
      continue;
    }
    const Tensor carried =
        where(equal(in[i + 3], 0), g, add(mul(in[i + 2], momentum), mul(g, 1 - dampening)));
    out.push_back(sub(p, mul(nesterov ? add(g, mul(carried, momentum)) : carried, lr)));
    out.push_back(carried);
    out.push_back(add(in[i + 3], 1));
    before.push_back(in[i + 2]);
    before.push_back(in[i + 3]);
  }
  return unless_skipped(skippable, in, {before.begin(), before.size()}, out);
}

Tensors RmspropStep::reference(Inputs in) const {
  Tensors before, out;
  for (std::size_t i = first(); i < in.size(); i += stride()) {
    const Tensor& p = in[i];
    const Tensor lr = to(in[0], p.dtype());
    Tensor g = to(gradient(*this, in, i + 1), p.dtype());
    if (weight_decay != 0) g = add(g, mul(p, weight_decay));
    const Tensor squares = add(mul(in[i + 2], alpha), mul(mul(g, g), 1 - alpha));
    Tensors state{squares};
    Tensor variance = squares;
    if (centered) {
      state.push_back(add(mul(in[i + 3], alpha), mul(g, 1 - alpha)));
      variance = sub(squares, mul(state[1], state[1]));
      variance = where(less(variance, 0), zeros_like(variance), variance);  // by rounding; NaN stays
    }
    Tensor move = div(g, add(sqrt(variance), eps));
    if (momentum != 0) state.push_back(move = add(mul(in[i + stride() - 1], momentum), move));
    out.push_back(sub(p, mul(move, lr)));
    for (const Tensor& written : state) out.push_back(written);
    before.push_back(p);
    for (std::size_t k = 2; k < stride(); ++k) before.push_back(in[i + k]);
  }
  return unless_skipped(skippable, in, {before.begin(), before.size()}, out);
}

Tensors LargestMagnitude::reference(Inputs in) const {
  Tensor largest = zeros({}, {DType::f64, in[0].device()});
  for (const Tensor& x : in)
    if (x.numel() > 0) largest = maximum(largest, to(amax(abs(x)), DType::f64));
  return {largest};
}

Tensor clip_factor(const Tensor& norm, double limit) { return minimum(div(limit, add(norm, 1e-6)), 1); }

Tensors ClipScale::reference(Inputs in) const {
  const Tensor factor = clip_factor(in[0], limit);
  Tensors out;
  for (const Tensor& x : in.subspan(1)) out.push_back(to(mul(to(x, DType::f64), factor), x.dtype()));
  return out;
}

}  // namespace ops

Tensor order_free_norm(std::span<const Tensor> tensors) {
  if (tensors.empty()) return Tensor::scalar(0, {DType::f64, Device::cpu()});
  return apply(ops::NormOfSums{}, apply_many(ops::SquareSums{}, tensors)[0]);
}

}  // namespace sherd
