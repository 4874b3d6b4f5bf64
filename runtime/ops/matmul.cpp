#include "runtime/ops/matmul.h"

#include <optional>

#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/linear.h"
#include "runtime/ops/matrix_operand.h"
#include "runtime/ops/view_as.h"

namespace sherd {
namespace ops {
namespace {

/// The step of all axes before the last two as one, if they have one. Axes of size 1 have any stride.
std::optional<std::int64_t> batch_step(const Tensor& t) {
  if (t.numel() == 0) return 0;
  std::optional<std::int64_t> step;
  std::int64_t next = 0;  // the stride that goes on with the axes inside
  for (int i = t.rank() - 3; i >= 0; --i) {
    if (t.shape()[i] == 1) continue;
    if (!step)
      step = t.strides()[i];
    else if (t.strides()[i] != next)
      return std::nullopt;
    next = t.strides()[i] * t.shape()[i];
  }
  return step.value_or(0);
}

}  // namespace

MatrixOperand matrix_operand(const Tensor& t, bool transposed) {
  const int r = t.rank();
  const std::int64_t rows = t.shape()[r - 2], cols = t.shape()[r - 1], down = t.strides()[r - 2],
                     across = t.strides()[r - 1];
  const bool row_major = (across == 1 || cols <= 1) && (down >= cols || rows <= 1);
  const bool column_major = (down == 1 || rows <= 1) && (across >= rows || cols <= 1);
  const std::optional<std::int64_t> step = batch_step(t);
  if (!step || *step < 0 || !(row_major || column_major)) return matrix_operand(clone(t), transposed);
  MatrixOperand o{t, t.raw(), 0, *step, transposed != !row_major};
  o.ld = row_major ? (rows > 1 ? down : cols) : (cols > 1 ? across : rows);
  if (o.ld == 0) o.ld = 1;
  return o;
}

MatrixOperand rows_operand(const Tensor& x, std::int64_t m, std::int64_t k) {
  const Shape rows{m, k};
  const Tensor dense = ViewAs::strides_over(x, rows) ? x : clone(x);
  return matrix_operand(alias(dense, {rows, *ViewAs::strides_over(dense, rows), dense.layout().offset}),
                        false);
}

namespace {

/// The message begins as PyTorch's, which programs match on.
void check_factors(std::string_view call, const Spec& a, const Spec& b) {
  check<DTypeError>(
      a.dtype == b.dtype,
      "mat1 and mat2 must have the same dtype, but got {} and {} ({} of {} and {}); cast one of "
      "them",
      a.dtype, b.dtype, call, a.shape, b.shape);
}

/// What a layer adds to its product.
void check_added(std::string_view what, const Spec& x, const Spec& added) {
  check<DTypeError>(x.dtype == added.dtype, "linear: input of {} and {} of {}; cast one of them", x.dtype,
                    what, added.dtype);
}

}  // namespace

void check_same_dtype(const Spec& a, const Spec& b) { check_factors("matmul", a, b); }

Specs MatMul::infer(SpecSpan in) const {
  const Spec &a = in[0], &b = in[1];
  check_same_dtype(a, b);
  check<DTypeError>(number_dtypes.contains(a.dtype), "matmul: takes numbers, got {}; cast the inputs first",
                    name_of(a.dtype));
  const int r = a.shape.rank();
  check<ShapeError>(r >= 2 && b.shape.rank() == r, "matmul: operands of shape {} and {}", a.shape, b.shape);
  const std::int64_t m = a.shape[transpose_a ? r - 1 : r - 2], k = a.shape[transpose_a ? r - 2 : r - 1];
  const std::int64_t kb = b.shape[transpose_b ? r - 1 : r - 2], n = b.shape[transpose_b ? r - 2 : r - 1];
  check<ShapeError>(k == kb, "matmul: inner dimensions differ: {}{} times {}{}", a.shape,
                    transpose_a ? "^T" : "", b.shape, transpose_b ? "^T" : "");
  Spec out = a;
  for (int i = 0; i + 2 < r; ++i)
    check<ShapeError>(a.shape[i] == b.shape[i], "matmul: batch dimensions differ: {} times {}", a.shape,
                      b.shape);
  out.shape[r - 2] = m;
  out.shape[r - 1] = n;
  return {out};
}

Tensors MatMul::grad(const GradArgs& args) const {
  const Tensor &gy = args.gy[0], &a = args.inputs[0], &b = args.inputs[1];
  Tensors grads(2);
  if (args.need(0))
    grads[0] =
        transpose_a ? apply(MatMul{transpose_b, true}, b, gy) : apply(MatMul{false, !transpose_b}, gy, b);
  if (args.need(1))
    grads[1] =
        transpose_b ? apply(MatMul{true, transpose_a}, gy, a) : apply(MatMul{!transpose_a, false}, a, gy);
  return grads;
}

Specs Linear::infer(SpecSpan in) const {
  const Spec &x = in[0], &w = in[1];
  check_factors("linear", x, w);
  check<DTypeError>(is_floating(x.dtype), "linear: takes floating dtypes, got {}; cast the inputs first",
                    name_of(x.dtype));
  check<ShapeError>(x.shape.rank() >= 1 && w.shape.rank() == 2 && x.shape.back() == w.shape[1],
                    "linear: input of shape {} does not fit weight (out, in) of shape {}", x.shape, w.shape);
  if (!in[2].is_none()) {
    check_added("bias", x, in[2]);
    check<ShapeError>(in[2].shape == Shape{w.shape[0]},
                      "linear: bias of shape {} does not fit weight (out, in) of shape {}", in[2].shape,
                      w.shape);
  }
  Spec out = x;
  out.shape[out.shape.rank() - 1] = w.shape[0];
  if (!in[3].is_none()) {
    check_added("residual", x, in[3]);
    check<ShapeError>(in[3].shape == out.shape, "linear: residual of shape {} for a result of shape {}",
                      in[3].shape, out.shape);
  }
  return {out};
}

Tensors Linear::grad(const GradArgs& args) const {
  const Shape &x_shape = args.specs[0].shape, &w_shape = args.specs[1].shape;
  const std::int64_t rows = rows_of(x_shape);
  const Tensor gy = reshape(args.gy[0], {rows, w_shape[0]});
  Tensors grads(4);
  if (args.need(0)) grads[0] = reshape(apply(MatMul{}, gy, args.inputs[1]), x_shape);
  if (args.need(1)) grads[1] = apply(MatMul{true, false}, gy, reshape(args.inputs[0], {rows, w_shape[1]}));
  if (args.need(2)) grads[2] = args.beside.gy_sums.defined() ? args.beside.gy_sums : sum(gy, {0});
  if (args.need(3)) grads[3] = args.gy[0];
  return grads;
}

Tensors Linear::reference(Inputs in) const {
  Tensor y = matmul(in[0], transpose(in[1], 0, 1));
  for (const std::size_t i : {2, 3})
    if (in[i].defined()) y = add(y, in[i]);
  return {y};
}

}  // namespace ops

Tensor matmul(const Tensor& a, const Tensor& b) {
  detail::check_given("matmul", a, b);
  check<ShapeError>(a.rank() >= 1 && b.rank() >= 1,
                    "matmul: operands of shape {} and {}; 0-d tensors multiply with *", a.shape(), b.shape());
  if (a.rank() == 1) return squeeze(matmul(unsqueeze(a, 0), b), b.rank() == 1 ? 0 : -2);
  if (b.rank() == 1) return squeeze(matmul(a, unsqueeze(b, 1)), -1);
  if (a.rank() == b.rank() && a.rank() == 2) return apply(ops::MatMul{}, a, b);
  if (b.rank() == 2) {  // many rows times one matrix
    ops::check_same_dtype(a.spec(), b.spec());
    check<ShapeError>(a.shape().back() == b.shape()[0], "matmul: inner dimensions differ: {} times {}",
                      a.shape(), b.shape());
    Shape shape = a.shape();
    shape[shape.rank() - 1] = b.shape()[1];
    return reshape(apply(ops::MatMul{}, reshape(a, {ops::rows_of(a.shape()), a.shape().back()}), b), shape);
  }
  const auto batch_of = [](const Tensor& t) {
    return Shape(std::span(t.shape().begin(), static_cast<std::size_t>(t.rank() - 2)));
  };
  const Shape batch = broadcast_shapes("matmul", batch_of(a), batch_of(b));
  const auto widened = [&](const Tensor& t) {
    Shape shape = batch;
    shape.push_back(t.shape()[t.rank() - 2]);
    shape.push_back(t.shape()[t.rank() - 1]);
    return expand(t, shape);
  };
  return apply(ops::MatMul{}, widened(a), widened(b));
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& residual) {
  detail::check_given("linear", x, weight);
  return apply(ops::Linear{}, x, weight, bias, residual);
}

}  // namespace sherd
