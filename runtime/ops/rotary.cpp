#include "runtime/ops/rotary.h"

#include <algorithm>
#include <limits>
#include <numbers>
#include <vector>

#include "runtime/apply.h"
#include "runtime/given.h"
#include "runtime/math.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {

/// Angles in f64: large positions times small rates keep their fractions.
Tensors RotaryTable::reference(Inputs) const {
  const std::int64_t steps = spec.shape[0], half = spec.shape[1];
  const TensorOptions exact{DType::f64, spec.device};
  const Tensor rates = exp(mul(arange(0, half, 1, exact),
                               -math::log(base) / static_cast<double>(std::max<std::int64_t>(half, 1))));
  Tensor slowed = rates;
  if (factor != 1) {
    std::vector<double> share;  // of the full speed, by pair
    for (std::int64_t i = 0; i < half; ++i) {
      const double rate = math::pow(base, -static_cast<double>(i) / static_cast<double>(half));
      const double turns = original * rate / (2 * std::numbers::pi);
      const double full_speed = std::clamp((turns - low) / (high - low), 0.0, 1.0);
      share.push_back(full_speed + (1 - full_speed) / factor);
    }
    slowed = mul(rates, to(Tensor::from(share, {half}, Device::cpu()), spec.device));
  }
  const Tensor angles = mul(unsqueeze(arange(first, first + steps, 1, exact), 1), slowed);
  return {to(cos(angles), spec.dtype), to(sin(angles), spec.dtype)};
}

Specs Rotary::infer(SpecSpan in) const {
  const Spec& x = in[0];
  check<ShapeError>(x.shape.rank() >= 3 && x.shape.back() % 2 == 0,
                    "rotary: x (..., T, Q, D) with an even D, got shape {}", x.shape);
  const Shape table{x.shape[x.shape.rank() - 3], x.shape.back() / 2};
  for (const Spec& t : in.subspan(1))
    check<ShapeError>(t.shape == table && t.dtype == compute_dtype(x.dtype),
                      "rotary: cosines and sines {} of {} for x {} of {}", t.shape, name_of(t.dtype), x.shape,
                      name_of(x.dtype));
  return {x};
}

Tensors Rotary::grad(const GradArgs& args) const {
  return {apply(Rotary{neighbours, !back}, args.gy[0], args.inputs[1], args.inputs[2]), {}, {}};
}

Tensors Rotary::reference(Inputs in) const {
  const Tensor& x = in[0];
  const std::int64_t half = x.shape().back() / 2;
  const Tensor c = unsqueeze(in[1], 1), s = unsqueeze(back ? neg(in[2]) : in[2], 1);
  Shape pairs = x.shape();
  pairs[pairs.rank() - 1] = neighbours ? half : 2;
  pairs.push_back(neighbours ? 2 : half);
  const Tensor paired = reshape(to(x, c.dtype()), pairs);
  const int axis = neighbours ? -1 : -2;
  const Tensor a = select(paired, axis, 0), b = select(paired, axis, 1);
  const Tensor turned = stack({sub(mul(a, c), mul(b, s)), add(mul(a, s), mul(b, c))}, axis);
  return {to(reshape(turned, x.shape()), x.dtype())};
}

}  // namespace ops

Tensor rotary(const Tensor& x, RotaryOptions o) {
  detail::check_given("rotary", x);
  check<DTypeError>(is_floating(x.dtype()), "rotary: takes floating dtypes, got {}", name_of(x.dtype()));
  check<ShapeError>(x.rank() >= 2 && x.shape().back() % 2 == 0,
                    "rotary: x (..., T, D) with an even D, got shape {}", x.shape());
  check<ValueError>(o.base > 0 && o.first >= 0,
                    "rotary: base {} must be positive and position {} not negative", o.base, o.first);
  check<ValueError>(o.first <= std::numeric_limits<std::int64_t>::max() - x.shape()[x.rank() - 2],
                    "rotary: {} steps from position {} on are beyond the largest integer",
                    x.shape()[x.rank() - 2], o.first);
  check<ValueError>(
      o.scaling.factor > 0 && o.scaling.high > o.scaling.low && o.scaling.original > 0,
      "rotary: scaling by {} between {} and {} turns in {} positions; all are positive, and the "
      "second number of turns is the larger one",
      o.scaling.factor, o.scaling.low, o.scaling.high, o.scaling.original);
  const Spec table{{x.shape()[x.rank() - 2], x.shape().back() / 2}, compute_dtype(x.dtype()), x.device()};
  const Tensors turns = apply_many(ops::RotaryTable{table, o.first, o.base, o.scaling.factor, o.scaling.low,
                                                    o.scaling.high, o.scaling.original},
                                   {});
  const auto turned = [&](const Tensor& y) {
    return apply(ops::Rotary{o.pairs == RotaryPairs::neighbours}, y, turns[0], turns[1]);
  };
  // Heads that lie within their steps, as a projection leaves them, stay there.
  if (x.rank() >= 3 && !x.is_contiguous())
    if (const Tensor by_step = transpose(x, -3, -2); by_step.is_contiguous())
      return transpose(turned(by_step), -3, -2);
  return squeeze(turned(unsqueeze(x, -2)), -2);
}

}  // namespace sherd
