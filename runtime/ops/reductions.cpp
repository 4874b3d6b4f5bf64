#include <algorithm>
#include <array>
#include <limits>

#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/extreme.h"
#include "runtime/ops/power.h"
#include "runtime/ops/prod.h"
#include "runtime/ops/sum.h"

namespace sherd {
namespace {

Shape reduced_shape(const Shape& shape, Mask axes, bool keep) {
  Shape out;
  for (int i = 0; i < shape.rank(); ++i) {
    if (!has(axes, static_cast<std::size_t>(i)))
      out.push_back(shape[i]);
    else if (keep)
      out.push_back(1);
  }
  return out;
}

/// `y` (reduced over axes) as it broadcasts against the input.
Tensor with_kept_axes(const Tensor& y, const Shape& input, Mask axes) {
  return reshape(y, reduced_shape(input, axes, true));
}

/// The product along `axis`, which has 1 element then: of its halves, again and again, and of what an odd
/// number of elements has over.
Tensor product_along(Tensor y, int axis) {
  Tensor over;
  for (std::int64_t n = y.shape()[axis]; n > 1; n /= 2) {
    if (n % 2 != 0) {
      const Tensor last = narrow(y, axis, n - 1, 1);
      over = over.defined() ? mul(over, last) : last;
    }
    y = mul(narrow(y, axis, 0, n / 2), narrow(y, axis, n / 2, n / 2));
  }
  return over.defined() ? mul(y, over) : y;
}

/// The gradient of rows (m, n) whose products' is `gy` (m, 1): through the product of their halves.
Tensor product_gradient(const Tensor& gy, const Tensor& x) {
  const std::int64_t n = x.shape()[1], pairs = n / 2, odd = n % 2;
  if (n == 1) return gy;
  const Tensor a = narrow(x, 1, 0, pairs), b = narrow(x, 1, pairs + odd, pairs);
  const Tensor g = product_gradient(gy, cat({mul(a, b), narrow(x, 1, pairs, odd)}, 1));
  const Tensor of_pairs = narrow(g, 1, 0, pairs);
  return cat({mul(of_pairs, b), narrow(g, 1, pairs, odd), mul(of_pairs, a)}, 1);
}

/// In which sums and products of elements of `dtype` are given.
DType total_dtype(DType dtype) { return is_floating(dtype) ? dtype : DType::i64; }

/// The mean of f64 over `axes`, kept, and once more of what lies apart from it: where all are equal, it is
/// what they are.
Tensor exact_mean(const Tensor& x, Mask axes) {
  const ops::Sum mean{{axes, true}, true};
  const Tensor rough = apply(mean, x), rest = apply(mean, sub(x, rough));
  return add(rough, where(isfinite(rest), rest, 0));
}

/// The gradient of what has the root `y` with the gradient `gy`.
Tensor gradient_of_root(const Tensor& gy, const Tensor& y) {
  return apply(ElementwiseGrad<ops::Root, 0>{}, gy, y);
}

/// Gradients of sums in f64 as `dtype`, at most its largest number where they are finite.
Tensor finite_in(DType dtype, const Tensor& of_sums) {
  constexpr double most = std::numeric_limits<float>::max();
  if (dtype != DType::f32) return of_sums;
  return to(where(isfinite(of_sums), clamp(of_sums, -most, most), of_sums), DType::f32);
}

/// The gradient of x where sums of |x|^power over `axes` have the gradients `of_sums`, in f64.
Tensor gradient_of_powers(const Tensor& x, Mask axes, int power, const Tensor& of_sums) {
  // Of |x| it is the upstream gradient or its negative, which no width changes.
  const Tensor wide = power == 1 ? x : detail::to_compute_dtype(x);
  const Tensor gy =
      to(finite_in(compute_dtype(x.dtype()), with_kept_axes(of_sums, x.shape(), axes)), wide.dtype());
  const auto slope = [&]<class F>(F) { return apply(ElementwiseGrad<F, 0>{}, expand(gy, x.shape()), wide); };
  return to(ops::with_size_to(power, slope), x.dtype());
}

}  // namespace

namespace ops {

OverAxes over_axes(std::string_view op, const Tensor& x, const Shape& axes, Keep keep) {
  Mask mask = 0;
  for (std::int64_t axis : axes) {
    const Mask added = bit(static_cast<std::size_t>(normalize_axis(op, axis, x.rank())));
    check<ValueError>((mask & added) == 0, "{}: axis {} of axes {} is there twice; name each axis once", op,
                      axis, axes);
    mask |= added;
  }
  if (axes.empty())
    for (int i = 0; i < x.rank(); ++i) mask |= bit(static_cast<std::size_t>(i));
  return {mask, keep == Keep::dims};
}

Spec OverAxes::reduced(const Spec& x, DType dtype) const {
  return {reduced_shape(x.shape, axes, keep), dtype, x.device};
}

Spec OverAxes::reduced_floats(std::string_view op, const Spec& x, DType dtype) const {
  check<DTypeError>(is_floating(x.dtype), "{}: takes floating dtypes, got {}; cast the input first", op,
                    name_of(x.dtype));
  return reduced(x, dtype);
}

Specs Sum::infer(SpecSpan in) const {
  const DType dtype = total_dtype(in[0].dtype);
  return {mean ? reduced_floats("mean", in[0], dtype) : reduced(in[0], dtype)};
}

Tensors Sum::grad(const GradArgs& args) const {
  const Shape& shape = args.specs[0].shape;
  Tensor gy = args.gy[0];
  if (mean) gy = div(gy, static_cast<double>(shape.numel()) / static_cast<double>(gy.numel()));
  return {expand(with_kept_axes(gy, shape, axes), shape)};
}

Specs PowerSum::infer(SpecSpan in) const { return {reduced_floats(name, in[0], DType::f64)}; }

Tensors PowerSum::reference(Inputs in) const {
  const Tensor wide = to(in[0], DType::f64);
  return {apply(Sum{*this}, with_size_to(power, [&](auto size) { return apply(size, wide); }))};
}

Tensors PowerSum::grad(const GradArgs& args) const {
  return {gradient_of_powers(args.inputs[0], axes, power, args.gy[0])};
}

Specs Norm::infer(SpecSpan in) const {
  return {reduced_floats(name, in[0], in[0].dtype), reduced(in[0], DType::f64)};
}

Tensors Norm::reference(Inputs in) const {
  const Tensor total = apply(PowerSum{*this, power}, in[0]);
  const Tensor wide = power == 1 ? total : apply(Root{}, total);
  return {to(wide, in[0].dtype()), wide};
}

Tensors Norm::grad(const GradArgs& args) const {
  if (args.gy[1].defined() || !args.gy[0].defined())
    return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Tensor gy = to(args.gy[0], DType::f64);
  return {gradient_of_powers(args.inputs[0], axes, power,
                             power == 1 ? gy : gradient_of_root(gy, args.outputs[1]))};
}

double Variance::left(std::int64_t n) const {
  const double left = static_cast<double>(n) - correction;
  return n > 0 && left > 0 ? left : std::numeric_limits<double>::quiet_NaN();
}

Specs Variance::infer(SpecSpan in) const {
  const Spec spec = reduced_floats(name, in[0], DType::f64);
  return {spec, spec};
}

Tensors Variance::reference(Inputs in) const {
  const Tensor x = to(in[0], DType::f64), mean = exact_mean(x, axes);
  const Tensor squares = apply(PowerSum{*this, 2}, sub(x, mean));
  const std::int64_t results = mean.numel();
  return {div(squares, left(results > 0 ? x.numel() / results : 0)), reshape(mean, squares.shape())};
}

Tensors Variance::grad(const GradArgs& args) const {
  if (args.gy[1].defined() || !args.gy[0].defined())
    return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Tensor& x = args.inputs[0];
  const std::array in{args.gy[0], x, args.outputs[1]};
  return args.create_graph ? VarianceGrad{*this}.reference(in) : apply_many(VarianceGrad{*this}, in);
}

Tensors VarianceGrad::reference(Inputs in) const {
  const Tensor &gy = in[0], &x = in[1], wide = to(x, DType::f64);
  const std::int64_t results = gy.numel();
  const Tensor factor = div(mul(gy, 2), of.left(results > 0 ? x.numel() / results : 0)),
               mean = with_kept_axes(in[2], x.shape(), of.axes);
  const Tensor gx = mul(sub(wide, mean), with_kept_axes(factor, x.shape(), of.axes));
  return {to(to(gx, compute_dtype(x.dtype())), x.dtype())};  // rounded as kernels round it
}

Specs Spread::infer(SpecSpan in) const {
  const Specs wide = of.infer(in);
  Spec narrow = wide[0];
  narrow.dtype = in[0].dtype;
  return {narrow, wide[0], wide[1]};
}

Tensors Spread::reference(Inputs in) const {
  const Tensors found = apply_many(of, in);
  const Tensor wide = root ? apply(Root{}, found[0]) : found[0];
  return {to(wide, in[0].dtype()), wide, found[1]};
}

Tensors Spread::grad(const GradArgs& args) const {
  if (args.gy[1].defined() || args.gy[2].defined() || !args.gy[0].defined())
    return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Tensor gy = to(args.gy[0], DType::f64);
  const std::array in{root ? gradient_of_root(gy, args.outputs[1]) : gy, args.inputs[0], args.outputs[2]};
  return args.create_graph ? VarianceGrad{of}.reference(in) : apply_many(VarianceGrad{of}, in);
}

Specs LogSumExp::infer(SpecSpan in) const {
  return {reduced_floats(name, in[0], compute_dtype(in[0].dtype))};
}

Tensors LogSumExp::reference(Inputs in) const {
  const Tensor x = detail::to_compute_dtype(in[0]);
  if (x.numel() == 0) return {log(apply(Sum{*this}, exp(x)))};
  // What is taken away and added is a constant to the gradient: any number would give the same.
  const Tensor top = apply(Extreme{{axes, true}}, x.detach()), finite = where(isfinite(top), top, 0);
  const Tensor logs = log(apply(Sum{*this}, exp(sub(x, finite))));
  return {add(logs, reshape(finite, logs.shape()))};
}

Tensors LogSumExp::grad(const GradArgs& args) const {
  const Tensor &x = args.inputs[0], wide = detail::to_compute_dtype(x);
  const Tensor y = with_kept_axes(args.outputs[0], x.shape(), axes).detach();
  // Shares of their own sum, as softmax has them: that of the output's rounding is off by as much as it is.
  const Tensor above = sub(wide, y), share = args.create_graph ? exp(above) : exp_(above);
  const Tensor total = apply(Sum{{axes, true}}, share);
  const Tensor gy = div(with_kept_axes(args.gy[0], x.shape(), axes), where(isfinite(total), total, 1));
  return {to(args.create_graph ? mul(share, gy) : mul_(share, gy), x.dtype())};
}

Specs Prod::infer(SpecSpan in) const { return {reduced(in[0], total_dtype(in[0].dtype))}; }

Tensors Prod::reference(Inputs in) const {
  const Spec out = infer(Specs{in[0].spec()})[0];
  // So that 16-bit floats are rounded once.
  Tensor y = to(in[0], is_floating(out.dtype) ? compute_dtype(out.dtype) : out.dtype);
  for (int i = 0; i < y.rank(); ++i) {
    if (!has(axes, static_cast<std::size_t>(i))) continue;
    y = y.shape()[i] == 0 ? add(sum(y, {i}, Keep::dims), 1) : product_along(y, i);
  }
  y = to(reshape(y, out.shape), out.dtype);
  return {y.is(in[0]) ? clone(y) : y};
}

Tensors Prod::grad(const GradArgs& args) const {
  if (args.create_graph) return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Tensor& x = args.inputs[0];
  if (x.numel() == 0) return {zeros_like(x)};
  // The axes that are multiplied come last, as one.
  Shape order, back = x.shape();
  for (const bool multiplied : {false, true})
    for (int i = 0; i < x.rank(); ++i)
      if (has(axes, static_cast<std::size_t>(i)) == multiplied) order.push_back(i);
  for (int i = 0; i < x.rank(); ++i) back[static_cast<int>(order[i])] = i;
  const Tensor ordered = permute(x, order);
  const std::int64_t m = args.gy[0].numel();
  const Tensor gx = apply(ProdGrad{}, reshape(args.gy[0], {m}), reshape(ordered, {m, x.numel() / m}));
  return {permute(reshape(gx, ordered.shape()), back)};
}

Tensors ProdGrad::reference(Inputs in) const {
  const DType wide = compute_dtype(in[1].dtype());
  return {to(product_gradient(unsqueeze(to(in[0], wide), 1), to(in[1], wide)), in[1].dtype())};
}

Specs Extreme::infer(SpecSpan in) const {
  for (int i = 0; i < in[0].shape.rank(); ++i)
    check<ShapeError>(!has(axes, static_cast<std::size_t>(i)) || in[0].shape[i] > 0,
                      "{}: axis {} of shape {} is empty and has no largest value", largest ? "amax" : "amin",
                      i, in[0].shape);
  return {reduced(in[0], in[0].dtype)};
}

Tensors Extreme::grad(const GradArgs& args) const {
  const Tensor& x = args.inputs[0];
  // Counted in wide numbers: there may be more winners than f16 can say.
  const DType wide = compute_dtype(x.dtype());
  const Tensor winners = to(equal(x, with_kept_axes(args.outputs[0], x.shape(), axes)), wide);
  const Tensor share = x.rank() == 0 ? winners : div(winners, apply(Sum{{axes, true}}, winners));
  return {to(mul(share, to(with_kept_axes(args.gy[0], x.shape(), axes), wide)), x.dtype())};
}

Specs ArgMax::infer(SpecSpan in) const {
  const std::string_view call = largest ? "argmax" : "argmin";
  check<ShapeError>(axis >= 0 && axis < std::max(in[0].shape.rank(), 1), "{}: axis {} of shape {}", call,
                    axis, in[0].shape);
  check<ShapeError>(in[0].shape.rank() == 0 || in[0].shape[axis] > 0, "{}: axis {} of shape {} is empty",
                    call, axis, in[0].shape);
  return {OverAxes{bit(static_cast<std::size_t>(axis)), keep}.reduced(in[0], DType::i64)};
}

}  // namespace ops

Tensor sum(const Tensor& x, Shape axes, Keep keep) {
  detail::check_given("sum", x);
  return apply(ops::Sum{ops::over_axes("sum", x, axes, keep)}, x);
}
Tensor mean(const Tensor& x, Shape axes, Keep keep) {
  detail::check_given("mean", x);
  return apply(ops::Sum{ops::over_axes("mean", x, axes, keep), true}, x);
}
Tensor prod(const Tensor& x, Shape axes, Keep keep) {
  detail::check_given("prod", x);
  return apply(ops::Prod{ops::over_axes("prod", x, axes, keep)}, x);
}
Tensor amax(const Tensor& x, Shape axes, Keep keep) {
  detail::check_given("amax", x);
  return apply(ops::Extreme{ops::over_axes("amax", x, axes, keep)}, x);
}
Tensor amin(const Tensor& x, Shape axes, Keep keep) {
  detail::check_given("amin", x);
  return apply(ops::Extreme{ops::over_axes("amin", x, axes, keep), false}, x);
}
Tensor argmax(const Tensor& x, std::int64_t axis, Keep keep) {
  detail::check_given("argmax", x);
  return apply(ops::ArgMax{normalize_axis("argmax", axis, x.rank()), keep == Keep::dims, true}, x);
}
Tensor argmin(const Tensor& x, std::int64_t axis, Keep keep) {
  detail::check_given("argmin", x);
  return apply(ops::ArgMax{normalize_axis("argmin", axis, x.rank()), keep == Keep::dims, false}, x);
}

}  // namespace sherd
