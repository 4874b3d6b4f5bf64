#include <cmath>

#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/arange.h"
#include "runtime/ops/full.h"
#include "runtime/ops/random.h"
#include "runtime/random.h"

namespace sherd {
namespace ops {

Tensors Fill::reference(Inputs in) const {
  return {full(in[0].shape(), value, {in[0].dtype(), in[0].device()})};
}

Tensors Fill::grad(const GradArgs& args) const { return {zeros_like(args.gy[0])}; }

Specs Uniform::infer(SpecSpan) const {
  check<DTypeError>(is_floating(spec.dtype), "uniform: takes floating dtypes, got {}; use randint",
                    name_of(spec.dtype));
  if (spec.dtype == DType::f64)  // refuse what cannot be drawn from
    uniform_range_f64(low, high);
  else
    uniform_range(spec.dtype, low, high);
  return {spec};
}

Specs Normal::infer(SpecSpan) const {
  check<DTypeError>(is_floating(spec.dtype), "normal: takes floating dtypes, got {}", name_of(spec.dtype));
  check<ValueError>(stddev >= 0, "normal: standard deviation {} is negative", stddev);
  return {spec};
}

namespace {

/// Up to which every integer is a number of `dtype`; for integers, whose bounds are checked apart, 2^63.
double largest_counted(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return 0x1p8;
    case DType::f16:
      return 0x1p11;
    case DType::f32:
      return 0x1p24;
    case DType::f64:
      return 0x1p53;
    default:
      return 0x1p63;
  }
}

}  // namespace

Specs RandomInteger::infer(SpecSpan) const {
  // As unsigned: the range of two i64 may be wider than one.
  const std::uint64_t range = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low);
  check<ValueError>(low < high && range <= (std::uint64_t{1} << 32),
                    "randint: [{}, {}) must hold 1 to 2^32 integers", low, high);
  for (const auto& [field, value] :
       {std::pair("smallest value", low), std::pair("largest value", high - 1)}) {
    detail::check_fits("randint", field, value, spec.dtype);
    // Beyond it neighbours round to one number, and the largest to `high`.
    check<DTypeError>(std::abs(static_cast<double>(value)) <= largest_counted(spec.dtype),
                      "randint: {} {} is beyond {}, to which {} counts in ones; use another dtype", field,
                      value, largest_counted(spec.dtype), name_of(spec.dtype));
  }
  return {spec};
}

Tensors RandomOrder::reference(Inputs) const {
  const RandomOrder on_host{{spec.shape, spec.dtype, Device::cpu()}, key};
  return {to(apply(on_host), spec.device)};
}

}  // namespace ops

namespace {

Spec spec_of(Shape shape, TensorOptions options) {
  for (std::int64_t n : shape) check<ShapeError>(n >= 0, "shape {}: sizes must not be negative", shape);
  return {std::move(shape), options.dtype, options.device};
}

/// Integers from `start` in steps of `step` before `end`; doubles lose count beyond 2^53.
std::int64_t count_whole(std::int64_t start, std::int64_t end, std::int64_t step) {
  if (step > 0 ? start >= end : start <= end) return 0;
  const auto distance = step > 0 ? static_cast<std::uint64_t>(end) - static_cast<std::uint64_t>(start)
                                 : static_cast<std::uint64_t>(start) - static_cast<std::uint64_t>(end);
  const std::uint64_t size =
      step > 0 ? static_cast<std::uint64_t>(step) : 0 - static_cast<std::uint64_t>(step);
  return static_cast<std::int64_t>((distance - 1) / size + 1);
}

RandomKey reserve(const Spec& spec) { return Context::current().generator().reserve(spec.shape.numel()); }

}  // namespace

Tensor full(Shape shape, Number value, TensorOptions options) {
  return apply(ops::Full{spec_of(std::move(shape), options), value});
}
Tensor zeros(Shape shape, TensorOptions options) { return full(std::move(shape), 0, options); }
Tensor ones(Shape shape, TensorOptions options) { return full(std::move(shape), 1, options); }
Tensor zeros_like(const Tensor& x) {
  detail::check_given("zeros_like", x);
  return zeros(x.shape(), {x.dtype(), x.device()});
}
Tensor full_like(const Tensor& x, Number value) {
  detail::check_given("full_like", x);
  return full(x.shape(), value, {x.dtype(), x.device()});
}
Tensor ones_like(const Tensor& x) {
  detail::check_given("ones_like", x);
  return ones(x.shape(), {x.dtype(), x.device()});
}

Tensor arange(Number start, Number end, Number step, TensorOptions options) {
  const auto from = start.as<double>(), to = end.as<double>(), by = step.as<double>();
  check<ValueError>(by != 0 && std::isfinite(from) && std::isfinite(to) && std::isfinite(by),
                    "arange: from {} to {} in steps of {} has no end", start, end, step);
  const double estimate = std::max(0.0, std::ceil((to - from) / by));
  check<ValueError>(estimate < 9e18,
                    "arange: from {} to {} in steps of {} are more elements than can be counted", start, end,
                    step);
  const bool whole = !start.is_floating() && !end.is_floating() && !step.is_floating();
  const std::int64_t n =
      !whole ? static_cast<std::int64_t>(estimate)
             : count_whole(start.as<std::int64_t>(), end.as<std::int64_t>(), step.as<std::int64_t>());
  if (whole && n > 0) {
    // Between the ends, as sums of unsigned numbers say though the product may be beyond them.
    const auto last = static_cast<std::uint64_t>(start.as<std::int64_t>()) +
                      static_cast<std::uint64_t>(n - 1) * static_cast<std::uint64_t>(step.as<std::int64_t>());
    detail::check_fits("arange", "last value", static_cast<std::int64_t>(last), options.dtype);
  } else if (n > 0 && !is_floating(options.dtype))
    detail::check_fits("arange", "last value", from + static_cast<double>(n - 1) * by, options.dtype);
  return apply(ops::Arange{spec_of({n}, options), start, step});
}

Tensor arange(Number start, Number end, Number step) {
  const bool whole = !start.is_floating() && !end.is_floating() && !step.is_floating();
  return arange(start, end, step, whole ? TensorOptions{.dtype = DType::i64} : TensorOptions{});
}

Tensor linspace(double start, double end, std::int64_t count, TensorOptions options) {
  check<ValueError>(count >= 0, "linspace: {} numbers", count);
  check<ValueError>(std::isfinite(start) && std::isfinite(end),
                    "linspace: from {} to {}; both must be finite", start, end);
  const TensorOptions wide{DType::f64, options.device};
  const Tensor i = arange(0, count, 1, wide);
  const auto last = static_cast<double>(count - 1);
  // From both ends, so that each is exact.
  const double step = count > 1 ? end / last - start / last : 0;
  return to(where(less(i, static_cast<double>(count) / 2), add(mul(i, step), start),
                  add(mul(sub(i, last), step), end)),
            options.dtype);
}

Tensor eye(std::int64_t rows, std::int64_t columns, TensorOptions options) {
  if (columns == -1) columns = rows;
  check<ValueError>(rows >= 0 && columns >= 0, "eye: {} rows and {} columns", rows, columns);
  const TensorOptions places{DType::i64, options.device};
  return to(equal(reshape(arange(0, rows, 1, places), {rows, 1}), arange(0, columns, 1, places)),
            options.dtype);
}

Tensor randperm(std::int64_t count, TensorOptions options) {
  check<ValueError>(count >= 0, "randperm: {} numbers", count);
  if (count > 0) detail::check_fits("randperm", "last value", count - 1, options.dtype);
  check<DTypeError>(static_cast<double>(count - 1) <= ops::largest_counted(options.dtype),
                    "randperm: last value {} is beyond {}, to which {} counts in ones; use another dtype",
                    count - 1, ops::largest_counted(options.dtype), name_of(options.dtype));
  if (options.device.type == DeviceType::meta) return empty(spec_of({count}, options));
  const Spec spec = spec_of({count}, {DType::i64, options.device});
  const RandomKey key = Context::current().generator().reserve(2 * count);
  return to(apply(ops::RandomOrder{spec, key}), options.dtype);
}

namespace {

void check_floating_probabilities(DType dtype) {
  check<DTypeError>(is_floating(dtype), "bernoulli: takes floating probabilities, got {}", name_of(dtype));
}

/// By address: what the host checks of its own memory is no read that a captured step would have to repeat.
template <class T>
void check_probabilities(const Tensor& p) {
  const T* at = p.numel() > 0 ? reinterpret_cast<const T*>(p.raw()) : nullptr;
  for (std::int64_t i = 0; i < p.numel(); ++i)
    check<ValueError>(at[i] >= 0 && at[i] <= 1, "bernoulli: probability {} at position {} is outside [0, 1]",
                      at[i], i);
}

}  // namespace

Tensor bernoulli(const Tensor& p) {
  detail::check_given("bernoulli", p);
  check_floating_probabilities(p.dtype());
  const Tensor wide = to(p.detach(), compute_dtype(p.dtype()));
  if (p.device().is_cpu() && wide.dtype() == DType::f64) check_probabilities<double>(contiguous(wide));
  if (p.device().is_cpu() && wide.dtype() == DType::f32) check_probabilities<float>(contiguous(wide));
  const ops::Bernoulli op{reserve(wide.spec())};
  const Tensor given = p.detach();
  // Without a kernel its ops are the caller's, whose last one writes what is returned.
  return kernel_row<ops::Bernoulli>().on(p.device().type) != nullptr ? apply(op, given)
                                                                     : op.reference(Inputs(&given, 1))[0];
}

Specs ops::Bernoulli::infer(SpecSpan in) const {
  check_floating_probabilities(in[0].dtype);
  return {in[0]};
}

Tensors ops::Bernoulli::reference(Inputs in) const {
  const Tensor wide = to(in[0], compute_dtype(in[0].dtype()));
  return {to(less(apply(Uniform{wide.spec(), key}), wide), in[0].dtype())};
}

Tensor rand(Shape shape, TensorOptions options, double low, double high) {
  const Spec spec = spec_of(std::move(shape), options);
  return apply(ops::Uniform{spec, reserve(spec), low, high});
}
Tensor randn(Shape shape, TensorOptions options, double mean, double stddev) {
  const Spec spec = spec_of(std::move(shape), options);
  return apply(ops::Normal{spec, reserve(spec), mean, stddev});
}
Tensor randint(std::int64_t low, std::int64_t high, Shape shape, TensorOptions options) {
  const Spec spec = spec_of(std::move(shape), options);
  return apply(ops::RandomInteger{spec, reserve(spec), low, high});
}

Tensor fill_(const Tensor& x, Number value) {
  detail::check_given("fill_", x);
  return apply(ops::Fill{value}, x);
}
Tensor zero_(const Tensor& x) {
  detail::check_given("zero_", x);
  return fill_(x, 0);
}
Tensor uniform_(const Tensor& x, double low, double high) {
  detail::check_given("uniform_", x);
  return copy_(x, rand(x.shape(), {x.dtype(), x.device()}, low, high));
}
Tensor normal_(const Tensor& x, double mean, double stddev) {
  detail::check_given("normal_", x);
  return copy_(x, randn(x.shape(), {x.dtype(), x.device()}, mean, stddev));
}

}  // namespace sherd
