// Steps that sum the columns of what they make, on any device.
#pragma once

#include <numeric>

#include "autograd/compile.h"
#include "runtime/fused_region.h"
#include "tests/autograd/fused_steps.h"

namespace sherd::test {

inline Shape all_axes_but_last(const Tensor& t) {
  Shape axes;
  for (int i = 0; i + 1 < t.rank(); ++i) axes.push_back(i);
  return axes;
}

/// Of two inputs of one shape, in another dtype: sums and means of columns beside sums of rows and what is
/// stored.
inline Step sums_of_columns(DType other) {
  return [other](std::span<const Tensor> in) {
    const Shape axes = all_axes_but_last(in[0]);
    const Tensor x = to(in[0], other), y = to(in[1], other);
    const Tensor scaled = mul(x, rsqrt(add(mean(square(x), {-1}, Keep::dims), 1e-5)));
    const Tensor product = mul(scaled, y);
    return std::vector<Tensor>{sum(product, axes), mean(scaled, axes, Keep::dims), to(scaled, in[0].dtype()),
                               sum(tanh(y), axes), sum(product, {-1})};
  };
}

/// Sums of columns in each region of a program.
inline std::vector<std::size_t> column_sums_by_region(const Program::Impl& program) {
  std::vector<std::size_t> counts;
  const auto is_one = [](const ops::Region::Member& member) {
    return ops::column_sum(*member.op, member.in[0].layout.shape, member.result.dtype) != nullptr;
  };
  for (const Program::Impl::Step& step : program.steps)
    if (const ops::Region* region = ops::region_of(*step.op))
      counts.push_back(static_cast<std::size_t>(std::ranges::count_if(region->members, is_one)));
  return counts;
}
inline std::size_t column_sums(const Program::Impl& program) {
  const std::vector<std::size_t> counts = column_sums_by_region(program);
  return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

/// A layer written out of small ops, and what is trained of it.
struct TrainedLayer {
  const char* name;
  Step step;
  std::vector<Tensor> in, parameters;
};
inline std::vector<TrainedLayer> trained_layers(const Shape& shape, DType dtype, Device device) {
  const auto drawn = [&](const Shape& of, unsigned seed) { return to(numbers(of, dtype, seed), device); };
  const Tensor gain = drawn({shape.back()}, 3).requires_grad_(),
               bias = drawn({shape.back()}, 4).requires_grad_();
  const auto scaled = [](const Tensor& x) {
    return mul(x, rsqrt(add(mean(square(x), {-1}, Keep::dims), 1e-5)));
  };
  const auto rms_norm = [=](std::span<const Tensor> in) {
    return std::vector<Tensor>{mul(to(scaled(to(in[0], f32)), in[0].dtype()), gain)};
  };
  const auto layer_norm = [=](std::span<const Tensor> in) {
    const Tensor x = to(in[0], f32), centred = sub(x, mean(x, {-1}, Keep::dims));
    return std::vector<Tensor>{add(mul(to(scaled(centred), in[0].dtype()), gain), bias)};
  };
  const auto gated = [=](std::span<const Tensor> in) {
    return std::vector<Tensor>{mul(silu(add(in[0], bias)), add(mul(in[1], gain), 1.0))};
  };
  return {{"rms norm", rms_norm, {drawn(shape, 1)}, {gain}},
          {"layer norm", layer_norm, {drawn(shape, 1)}, {gain, bias}},
          {"gated", gated, {drawn(shape, 1), drawn(shape, 2)}, {gain, bias}}};
}

/// What a call of the layer gives, and the gradients.
template <class F>
std::vector<Tensor> trained(const TrainedLayer& layer, const F& call) {
  std::vector<Tensor> in = copies(layer.in), all;
  for (Tensor& t : in) t.requires_grad_();
  for (Tensor t : layer.parameters) t.set_grad({});
  const Tensor y = call(std::span<const Tensor>(in))[0];
  y.backward(to(numbers(y.shape(), y.dtype(), 9), y.device()));
  all.push_back(y.detach());
  for (const std::vector<Tensor>& of : {in, layer.parameters})
    for (const Tensor& t : of) all.push_back(t.grad());
  return all;
}

}  // namespace sherd::test
