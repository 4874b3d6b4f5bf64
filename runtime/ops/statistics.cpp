// Reductions that are made of other ops.
#include <cmath>
#include <limits>

#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/elementwise.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/power.h"
#include "runtime/ops/sum.h"

namespace sherd {
namespace {

void check_floating(std::string_view call, const Tensor& x) {
  check<DTypeError>(is_floating(x.dtype()), "{}: takes floating dtypes, got {}; cast the input first", call,
                    name_of(x.dtype()));
}

/// What `f` computes of `x`, 16-bit floats in f32.
template <class F>
Tensor in_wide(const Tensor& x, const F& f) {
  return to(f(detail::to_compute_dtype(x)), x.dtype());
}

Tensor spread(std::string_view call, const Tensor& x, const Shape& axes, Keep keep, double correction,
              bool root) {
  check_floating(call, x);
  const ops::Spread op{{ops::over_axes(call, x, axes, keep), correction}, root};
  return apply_many(op, Inputs(&x, 1))[0];
}

Picked pick(const Tensor& x, const Tensor& at, std::int64_t axis, Keep keep) {
  if (x.rank() == 0) return {clone(x), at};
  const Tensor values = gather(x, axis, at);
  return keep == Keep::dims ? Picked{values, at} : Picked{squeeze(values, axis), squeeze(at, axis)};
}

}  // namespace

Picked max(const Tensor& x, std::int64_t axis, Keep keep) {
  detail::check_given("max", x);
  return pick(x, argmax(x, axis, Keep::dims), axis, keep);
}
Picked min(const Tensor& x, std::int64_t axis, Keep keep) {
  detail::check_given("min", x);
  return pick(x, argmin(x, axis, Keep::dims), axis, keep);
}

Tensor any(const Tensor& x, Shape axes, Keep keep) {
  detail::check_given("any", x);
  return greater(sum(to(x, DType::boolean), std::move(axes), keep), 0);
}
Tensor all(const Tensor& x, Shape axes, Keep keep) {
  detail::check_given("all", x);
  const Tensor count = sum(to(x, DType::boolean), std::move(axes), keep);
  return equal(count, count.numel() > 0 ? x.numel() / count.numel() : 0);
}

Tensor var(const Tensor& x, Shape axes, Keep keep, double correction) {
  detail::check_given("var", x);
  return spread("var", x, axes, keep, correction, false);
}

Tensor stddev(const Tensor& x, Shape axes, Keep keep, double correction) {
  detail::check_given("stddev", x);
  return spread("stddev", x, axes, keep, correction, true);
}

bool allclose(const Tensor& a, const Tensor& b, double relative, double absolute) {
  detail::check_given("allclose", a, b);
  check<ValueError>(relative >= 0 && absolute >= 0, "allclose: tolerances {} and {} are not above 0",
                    relative, absolute);
  check<DTypeError>(a.dtype() == b.dtype(), "allclose: inputs are {} and {}; cast one of them",
                    name_of(a.dtype()), name_of(b.dtype()));
  const GradMode without(false);
  const Tensor x = to(a, DType::f64), y = to(b, DType::f64);
  Tensor apart = abs(sub(x, y));
  if (is_integral(a.dtype()))  // differences that f64 does not see, and those beyond i64
    apart = maximum(apart, abs(to(sub(to(a, DType::i64), to(b, DType::i64)), DType::f64)));
  const Tensor near = less_equal(apart, add(mul(abs(y), relative), absolute));
  return all(logical_or(equal(a, b), logical_and(isfinite(apart), near))).item<bool>();
}

Tensor norm(const Tensor& x, double p, Shape axes, Keep keep) {
  detail::check_given("norm", x);
  check_floating("norm", x);
  check<ValueError>(!std::isnan(p), "norm: an order that is no number");
  const ops::OverAxes over = ops::over_axes("norm", x, axes, keep);
  for (int i = 0; std::isinf(p) && i < x.rank(); ++i)
    check<ShapeError>(!has(over.axes, static_cast<std::size_t>(i)) || x.shape()[i] > 0,
                      "norm: of no elements none is the largest; shape {} has an empty axis", x.shape());
  if (p == 1 || p == 2) return apply_many(ops::Norm{over, static_cast<int>(p)}, Inputs(&x, 1))[0];
  return in_wide(x, [&](const Tensor& y) {
    const Tensor size = abs(y);
    if (p == 0) return sum(where(not_equal(y, 0), 1, mul(y, 0)), axes, keep);
    if (std::isinf(p)) return p > 0 ? amax(size, axes, keep) : amin(size, axes, keep);
    // Of 0 neither is differentiated: their gradient there is infinite, and 0 times it no number.
    const auto powers = [](const Tensor& of, double power) {
      const Tensor zero = equal(of, 0);
      return where(zero, power > 0 ? 0 : std::numeric_limits<double>::infinity(),
                   pow(where(zero, 1, of), power));
    };
    return powers(sum(powers(size, p), axes, keep), 1 / p);
  });
}

Tensor logsumexp(const Tensor& x, Shape axes, Keep keep) {
  detail::check_given("logsumexp", x);
  check_floating("logsumexp", x);
  return to(apply(ops::LogSumExp{ops::over_axes("logsumexp", x, axes, keep)}, x), x.dtype());
}

Tensor logcumsumexp(const Tensor& x, std::int64_t axis) {
  detail::check_given("logcumsumexp", x);
  check_floating("logcumsumexp", x);
  const int at = normalize_axis("logcumsumexp", axis, x.rank());
  if (x.rank() == 0) return clone(x);
  const std::int64_t n = x.shape()[at];
  if (n <= 1 || x.numel() == 0) return clone(x);
  std::int64_t outer = 1;
  for (int i = 0; i < at; ++i) outer *= x.shape()[i];
  Tensor y = reshape(detail::to_compute_dtype(x), {outer, n, x.numel() / outer / n});
  // Sums of pairs at growing distances (Hillis and Steele, 1986): each has the maximum of its own elements
  // taken off, where one maximum for all would lose what is far below it.
  for (std::int64_t by = 1; by < n; by *= 2)
    y = cat(
        {narrow(y, 1, 0, by), logsumexp(stack({narrow(y, 1, by, n - by), narrow(y, 1, 0, n - by)}, 0), {0})},
        1);
  return to(reshape(y, x.shape()), x.dtype());
}

}  // namespace sherd
