#include "runtime/ops/order_free_norm.h"

#include "runtime/apply.h"
#include "runtime/exact_squares.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {
namespace {

void check_floating(std::string_view op, const Spec& s) {
  check<DTypeError>(is_floating(s.dtype), "{}: takes floating tensors, got {}; cast it", op,
                    name_of(s.dtype));
}

}  // namespace

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
  check<DTypeError>(in[0].dtype == DType::f64 && in[0].shape.rank() == 0,
                    "{}: the norm must be a 0-d f64 tensor, got {} {}", name, name_of(in[0].dtype),
                    in[0].shape);
  for (const Spec& s : in.subspan(1)) check_floating(name, s);
  return {};
}

Tensors LargestMagnitude::reference(Inputs in) const {
  Tensor largest = zeros({}, {DType::f64, in[0].device()});
  for (const Tensor& x : in)
    if (x.numel() > 0) largest = maximum(largest, to(amax(abs(x)), DType::f64));
  return {largest};
}

Tensor clip_factor(const Tensor& norm, double limit) { return minimum(div(limit, add(norm, 1e-6)), 1); }

Tensor times_factor(const Tensor& x, const Tensor& factor) {
  return to(to(mul(to(x, DType::f64), factor), compute_dtype(x.dtype())), x.dtype());
}

Tensors ClipScale::reference(Inputs in) const {
  const Tensor factor = clip_factor(in[0], limit);
  Tensors out;
  for (const Tensor& x : in.subspan(1)) out.push_back(times_factor(x, factor));
  return out;
}

}  // namespace ops

Tensor order_free_norm(std::span<const Tensor> tensors) {
  if (tensors.empty()) return Tensor::scalar(0, {DType::f64, Device::cpu()});
  return apply(ops::NormOfSums{}, apply_many(ops::SquareSums{}, tensors)[0]);
}

}  // namespace sherd
