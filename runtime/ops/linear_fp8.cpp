#include "runtime/ops/linear_fp8.h"

#include "runtime/apply.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/linear.h"
#include "runtime/ops/matmul.h"
#include "runtime/ops/order_free_norm.h"

namespace sherd {
namespace ops {
namespace {

/// x as the 8-bit numbers say it, in f32, for the largest magnitude of x or of its rows or columns.
Tensor rounded(const Tensor& x, const Tensor& largest, Eight format) {
  const bool fine = format == Eight::e4m3;
  const double top = largest_of(format);
  const double least = scalable(0, top);
  const Tensor from = where(less(largest, least), full({}, least, {DType::f64, x.device()}), largest);
  const Tensor scale = to(div(top, from), DType::f32), unscale = to(div(from, top), DType::f32);
  const Tensor scaled = clamp(mul(to(x, DType::f32), scale), -top, top);
  // Dekker's way to cut a number to some of its bits; below the normal numbers, steps of one size.
  const Tensor apart = mul(scaled, fine ? 0x1p20 + 1 : 0x1p21 + 1), normal = sub(apart, sub(apart, scaled));
  const double shift = fine ? 0x1.8p14 : 0x1.8p7;
  const Tensor small = sub(add(scaled, shift), shift);
  return mul(where(less(abs(scaled), fine ? 0x1p-6 : 0x1p-14), small, normal), unscale);
}

Tensor largest_magnitude(const Tensor& x) { return apply_many(LargestMagnitude{}, std::span(&x, 1))[0]; }

/// Those along `axis`, which stays with size 1.
Tensor largest_along(const Tensor& x, int axis) {
  if (x.numel() > 0) return to(amax(abs(x), {axis}, Keep::dims), DType::f64);
  Shape shape = x.shape();
  shape[axis < 0 ? x.rank() + axis : axis] = 1;
  return zeros(shape, {DType::f64, x.device()});
}
/// `rounded` by the rows or by the columns of a matrix.
Tensor by_its_rows(const Tensor& x) { return rounded(x, largest_along(x, -1), Eight::e4m3); }
Tensor by_its_columns(const Tensor& x) { return rounded(x, largest_along(x, 0), Eight::e4m3); }

}  // namespace

Specs LinearFp8::infer(SpecSpan in) const {
  const Spec all[] = {in[0], in[1], in[2], Spec::none()};
  const Spec number{{}, DType::f64, in[0].device}, out = Linear{}.infer(all)[0];
  return by_rows ? Specs{out} : Specs{out, number, number};
}

Tensors LinearFp8::grad(const GradArgs& args) const {
  check<NotImplementedError>(
      !args.create_graph, "linear_fp8: has no second derivative, since it rounds its gradients; take linear");
  const Shape &x_shape = args.specs[0].shape, &w_shape = args.specs[1].shape;
  const std::int64_t rows = rows_of(x_shape);
  const Tensor gy = reshape(args.gy[0], {rows, w_shape[0]});
  Tensors grads(3);
  if (args.need(0) || args.need(1)) {
    const Tensor in[] = {gy, reshape(args.inputs[0], {rows, w_shape[1]}), args.inputs[1],
                         by_rows ? Tensor() : args.outputs[1], by_rows ? Tensor() : args.outputs[2]};
    Tensors both = apply_many(LinearFp8Grad{by_rows}, in);
    if (args.need(0)) grads[0] = reshape(both[0], x_shape);
    if (args.need(1)) grads[1] = both[1];
  }
  if (args.need(2)) grads[2] = sum(gy, {0});
  return grads;
}

Tensors LinearFp8::reference(Inputs in) const {
  const Tensor bias = in[2].defined() ? to(in[2], DType::f32) : Tensor{};
  if (by_rows) return {to(linear(by_its_rows(in[0]), by_its_rows(in[1]), bias), in[0].dtype())};
  const Tensor x = largest_magnitude(in[0]), weight = largest_magnitude(in[1]);
  const Tensor y = linear(rounded(in[0], x, Eight::e4m3), rounded(in[1], weight, Eight::e4m3), bias);
  return {to(y, in[0].dtype()), x, weight};
}

Tensors LinearFp8Grad::reference(Inputs in) const {
  if (by_rows)
    return {to(matmul(by_its_rows(in[0]), by_its_columns(in[2])), in[1].dtype()),
            to(matmul(transpose(by_its_columns(in[0]), 0, 1), by_its_columns(in[1])), in[2].dtype())};
  const Tensor gy = rounded(in[0], largest_magnitude(in[0]), Eight::e5m2);
  const Tensor gx = matmul(gy, rounded(in[2], in[4], Eight::e4m3)),
               gw = matmul(transpose(gy, 0, 1), rounded(in[1], in[3], Eight::e4m3));
  return {to(gx, in[1].dtype()), to(gw, in[2].dtype())};
}

}  // namespace ops

Tensor linear_fp8(const Tensor& x, const Tensor& weight, const Tensor& bias, EightScales scales) {
  detail::check_given("linear_fp8", x, weight);
  const Tensor in[] = {x, weight, bias};
  return apply_many(ops::LinearFp8{scales == EightScales::of_rows}, in)[0];
}

}  // namespace sherd
