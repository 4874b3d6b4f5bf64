#include "runtime/ops/rotary.h"

#include <algorithm>
#include <cmath>
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
      const double pair = static_cast<double>(i);
      const double measured =
          measure == RotaryMeasure::pair
              ? pair
              : original * math::pow(base, -pair / static_cast<double>(half)) / (2 * std::numbers::pi);
      const double full_speed = std::clamp((measured - low) / (high - low), 0.0, 1.0);
      share.push_back(full_speed + (1 - full_speed) / factor);
    }
    slowed = mul(rates, to(Tensor::from(share, {half}, Device::cpu()), spec.device));
  }
  const Tensor angles = mul(unsqueeze(arange(first, first + steps, 1, exact), 1), slowed);
  const auto scaled = [&](const Tensor& x) { return amplitude == 1 ? x : mul(x, amplitude); };
  return {to(scaled(cos(angles)), spec.dtype), to(scaled(sin(angles)), spec.dtype)};
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

namespace {

/// The number of the pair, of `half`, that turns `turns` times in the scaling's positions; a fraction.
double pair_of_turns(const RotaryScaling& s, double base, double half, double turns) {
  return half * math::log(s.original / (turns * 2 * std::numbers::pi)) / math::log(base);
}

/// The table of `half` pairs whose steps end before `end`.
ops::RotaryTable table_of(const Spec& spec, const RotaryOptions& o, std::int64_t end) {
  const RotaryScaling& s = o.scaling;
  const double half = static_cast<double>(spec.shape[1]);
  ops::RotaryTable table{
      spec, o.first, o.base, s.factor, s.low, s.high, s.original, ops::RotaryMeasure::turns, s.amplitude};
  switch (s.kind) {
    case RotaryKind::llama3:
      break;
    case RotaryKind::linear:  // every pair is beyond `low`
      table.low = -1, table.high = -2;
      table.measure = ops::RotaryMeasure::pair;
      break;
    case RotaryKind::dynamic:
      table.factor = 1;
      if (const double stretched =
              s.factor * std::max(static_cast<double>(end) / s.original, 1.0) - (s.factor - 1);
          stretched != 1)
        table.base = o.base * math::pow(stretched, half / (half - 1));
      break;
    case RotaryKind::yarn:
    case RotaryKind::yarn_fractional: {
      const bool whole = s.kind == RotaryKind::yarn;
      const double fast = pair_of_turns(s, o.base, half, s.high),
                   slow = pair_of_turns(s, o.base, half, s.low);
      table.high = std::max(whole ? std::floor(fast) : fast, 0.0);
      table.low = std::min(whole ? std::ceil(slow) : slow, 2 * half - 1);
      if (table.low == table.high) table.low += 1e-3;
      table.measure = ops::RotaryMeasure::pair;
      break;
    }
  }
  return table;
}

void check_scaling(const RotaryOptions& o, std::int64_t width) {
  const RotaryScaling& s = o.scaling;
  check<ValueError>(
      s.factor > 0 && s.high > s.low && s.original > 0,
      "rotary: scaling by {} between {} and {} turns in {} positions; all are positive, and the "
      "second number of turns is the larger one",
      s.factor, s.low, s.high, s.original);
  check<ValueError>(s.amplitude > 0, "rotary: amplitude {} must be positive", s.amplitude);
  if (s.kind == RotaryKind::dynamic)
    check<ValueError>(width != 2 && s.factor >= 1,
                      "rotary: dynamic scaling by {} of {} features; it takes at least 1, and more than 2",
                      s.factor, width);
  if (s.kind == RotaryKind::yarn || s.kind == RotaryKind::yarn_fractional)
    check<ValueError>(o.base > 1 && s.low > 0,
                      "rotary: yarn takes a base above 1 and turns above 0, got {} and {}", o.base, s.low);
}

}  // namespace

RotaryTurns rotary_turns(std::int64_t steps, std::int64_t width, const RotaryOptions& o,
                         TensorOptions tensor) {
  check<DTypeError>(is_floating(tensor.dtype), "rotary: takes floating dtypes, got {}",
                    name_of(tensor.dtype));
  check<ShapeError>(steps >= 0 && width % 2 == 0, "rotary: {} steps of {} features, which are even", steps,
                    width);
  check<ValueError>(o.base > 0 && o.first >= 0,
                    "rotary: base {} must be positive and position {} not negative", o.base, o.first);
  check<ValueError>(o.first <= std::numeric_limits<std::int64_t>::max() - steps,
                    "rotary: {} steps from position {} on are beyond the largest integer", steps, o.first);
  check_scaling(o, width);
  const Spec table{{steps, width / 2}, compute_dtype(tensor.dtype), tensor.device};
  const Tensors turns = apply_many(table_of(table, o, o.first + steps), {});
  return {turns[0], turns[1]};
}

Tensor rotary(const Tensor& x, const RotaryTurns& turns, RotaryPairs pairs) {
  detail::check_given("rotary", x, turns.cosines, turns.sines);
  check<ShapeError>(x.rank() >= 2, "rotary: x (..., T, D) with an even D, got shape {}", x.shape());
  const auto turned = [&](const Tensor& y) {
    return apply(ops::Rotary{pairs == RotaryPairs::neighbours}, y, turns.cosines, turns.sines);
  };
  // Heads that lie within their steps, as a projection leaves them, stay there.
  if (x.rank() >= 3 && !x.is_contiguous())
    if (const Tensor by_step = transpose(x, -3, -2); by_step.is_contiguous())
      return transpose(turned(by_step), -3, -2);
  return squeeze(turned(unsqueeze(x, -2)), -2);
}

Tensor rotary(const Tensor& x, RotaryOptions o) {
  detail::check_given("rotary", x);
  check<DTypeError>(is_floating(x.dtype()), "rotary: takes floating dtypes, got {}", name_of(x.dtype()));
  check<ShapeError>(x.rank() >= 2 && x.shape().back() % 2 == 0,
                    "rotary: x (..., T, D) with an even D, got shape {}", x.shape());
  const std::int64_t steps = x.shape()[x.rank() - 2], width = x.shape().back();
  return rotary(x, rotary_turns(steps, width, o, {x.dtype(), x.device()}), o.pairs);
}

}  // namespace sherd
