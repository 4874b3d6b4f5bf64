#include <cmath>

#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/cpu/random.h"
#include "runtime/ops.h"
#include "runtime/ops/arange.h"
#include "runtime/ops/full.h"
#include "runtime/ops/random.h"

namespace sherd {
namespace ops {
namespace {

template <class T>
T from_double(double value) {
  return static_cast<T>(static_cast<compute_t<T>>(value));
}

cpu::RandomAt at(RandomKey key) { return {key.seed, key.offset}; }

/// Random kernels make f32; other dtypes round from it, so every dtype sees the same numbers.
template <class F>
void fill_f32_then_cast(const Tensor& out, F&& fill) {
  if (out.dtype() == DType::f32) return fill(reinterpret_cast<float*>(out.raw()));
  const Tensor wide = empty(out.shape(), {DType::f32});
  fill(static_cast<float*>(wide.storage().data()));
  copy_(alias(out, out.layout()), wide);
}

}  // namespace

void Full::run(Cpu, Inputs, Outputs out) const {
  dispatch(out[0].dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::fill_n(reinterpret_cast<T*>(out[0].raw()), out[0].numel(), from_double<T>(value));
  });
}

void Fill::run(Cpu, Inputs in, Outputs) const {
  if (!in[0].is_contiguous()) {
    copy_(alias(in[0], in[0].layout()), Tensor::scalar(value, {in[0].dtype(), in[0].device()}));
    return;
  }
  dispatch(in[0].dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::fill_n(reinterpret_cast<T*>(in[0].raw()), in[0].numel(), from_double<T>(value));
  });
}

Tensors Fill::grad(const GradArgs& args) const { return {zeros_like(args.gy[0])}; }

void Arange::run(Cpu, Inputs, Outputs out) const {
  dispatch(out[0].dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto* y = reinterpret_cast<T*>(out[0].raw());
    for (std::int64_t i = 0; i < out[0].numel(); ++i)
      y[i] = from_double<T>(start + static_cast<double>(i) * step);
  });
}

Specs Uniform::infer(SpecSpan) const {
  check<DTypeError>(is_floating(spec.dtype), "uniform: takes floating dtypes, got {}; use randint",
                    name_of(spec.dtype));
  check<ValueError>(low <= high, "uniform: range [{}, {}) is empty", low, high);
  return {spec};
}
void Uniform::run(Cpu, Inputs, Outputs out) const {
  fill_f32_then_cast(out[0], [&](float* y) { cpu::fill_uniform(at(key), low, high, y, out[0].numel()); });
}

Specs Normal::infer(SpecSpan) const {
  check<DTypeError>(is_floating(spec.dtype), "normal: takes floating dtypes, got {}", name_of(spec.dtype));
  check<ValueError>(stddev >= 0, "normal: standard deviation {} is negative", stddev);
  return {spec};
}
void Normal::run(Cpu, Inputs, Outputs out) const {
  fill_f32_then_cast(out[0], [&](float* y) { cpu::fill_normal(at(key), mean, stddev, y, out[0].numel()); });
}

Specs RandomInteger::infer(SpecSpan) const {
  check<ValueError>(low < high && high - low <= (std::int64_t{1} << 32),
                    "randint: [{}, {}) must hold 1 to 2^32 integers", low, high);
  return {spec};
}
void RandomInteger::run(Cpu, Inputs, Outputs out) const {
  const Tensor wide = out[0].dtype() == DType::i64 ? out[0] : empty(out[0].shape(), {DType::i64});
  cpu::fill_integers(at(key), low, high, reinterpret_cast<std::int64_t*>(wide.raw()), wide.numel());
  if (!wide.is(out[0])) copy_(alias(out[0], out[0].layout()), wide);
}

}  // namespace ops

namespace {

Spec spec_of(Shape shape, TensorOptions options) {
  for (std::int64_t n : shape) check<ShapeError>(n >= 0, "shape {}: sizes must not be negative", shape);
  return {std::move(shape), options.dtype, options.device};
}
RandomKey reserve(const Spec& spec) { return Context::current().generator().reserve(spec.shape.numel()); }

}  // namespace

Tensor full(Shape shape, double value, TensorOptions options) {
  return apply(ops::Full{spec_of(std::move(shape), options), value});
}
Tensor zeros(Shape shape, TensorOptions options) { return full(std::move(shape), 0, options); }
Tensor ones(Shape shape, TensorOptions options) { return full(std::move(shape), 1, options); }
Tensor zeros_like(const Tensor& x) { return zeros(x.shape(), {x.dtype(), x.device()}); }
Tensor ones_like(const Tensor& x) { return ones(x.shape(), {x.dtype(), x.device()}); }

Tensor arange(double start, double end, double step, TensorOptions options) {
  check<ValueError>(step != 0 && std::isfinite(start) && std::isfinite(end) && std::isfinite(step),
                    "arange: from {} to {} in steps of {} has no end", start, end, step);
  const auto n = static_cast<std::int64_t>(std::max(0.0, std::ceil((end - start) / step)));
  return apply(ops::Arange{spec_of({n}, options), start, step});
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

const Tensor& fill_(const Tensor& x, double value) { return apply(ops::Fill{value}, x), x; }
const Tensor& zero_(const Tensor& x) { return fill_(x, 0); }
const Tensor& uniform_(const Tensor& x, double low, double high) {
  return copy_(x, rand(x.shape(), {x.dtype(), x.device()}, low, high));
}
const Tensor& normal_(const Tensor& x, double mean, double stddev) {
  return copy_(x, randn(x.shape(), {x.dtype(), x.device()}, mean, stddev));
}

}  // namespace sherd
