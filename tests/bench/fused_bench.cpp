// Layers written out of small ops on the CPU: called, and compiled by each executor. torch_fused.py runs the
// same ones.
//   tests/bench/fused_bench [--threads 2] [--rows 512] [--columns 1024] [--bf16]
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>

#include "sherd.h"

namespace {

using namespace sherd;

/// Median microseconds of a call.
double time_of(const std::function<void()>& call) {
  constexpr int warm = 5, calls = 60;
  std::vector<double> times;
  for (int i = 0; i < warm + calls; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    if (i >= warm) times.push_back(time.count());
  }
  std::ranges::nth_element(times, times.begin() + calls / 2);
  return times[calls / 2];
}

struct Layer {
  const char* name;
  Step step;
};

/// Of two inputs of `shape`, whose columns are a multiple of 64.
std::vector<Layer> layers(const Shape& shape, DType dtype) {
  const std::int64_t rows = shape[0], heads = shape[1] / 64;
  Tensor gain = to(randn({shape[1]}), dtype);
  gain.requires_grad_();
  const Tensor cosine = to(randn({rows, 1, 64}), dtype), sine = to(randn({rows, 1, 64}), dtype);
  const auto one = [](const Tensor& t) { return std::vector<Tensor>{t}; };
  return {{"chain of 16",
           [=](std::span<const Tensor> in) {
             Tensor y = in[0];
             for (int i = 0; i < 4; ++i) y = tanh((y * in[1] + in[0]) * 0.5);
             return one(y);
           }},
          {"rms_norm",
           [=](std::span<const Tensor> in) {
             const Tensor x = to(in[0], f32);
             return one(to(x * rsqrt(mean(square(x), {-1}, Keep::dims) + 1e-5), in[0].dtype()) * gain);
           }},
          {"swiglu", [=](std::span<const Tensor> in) { return one(in[0] * sigmoid(in[0]) * in[1]); }},
          {"rotary",
           [=](std::span<const Tensor> in) {
             const Tensor x = reshape(in[0], {rows, heads, 64});
             const Tensor turned = cat({neg(narrow(x, -1, 32, 32)), narrow(x, -1, 0, 32)}, -1);
             return one(x * cosine + turned * sine);
           }},
          {"gelu, tanh", [=](std::span<const Tensor> in) {
             const Tensor& x = in[0];
             return one(x * 0.5 * (tanh((x + x * x * x * 0.044715) * 0.79788456) + 1.0));
           }}};
}

void measure(const Layer& layer, const Shape& shape, DType dtype) {
  std::vector<Tensor> in{to(randn(shape), dtype), to(randn(shape), dtype)};
  const Tensor upstream = to(randn(shape), dtype);
  const auto times = [&](const auto& call) {
    const double forward = time_of([&] {
      const NoGrad guard;
      call(std::span<const Tensor>(in));
    });
    for (Tensor& x : in) x.requires_grad_();
    const double both = time_of([&] {
      const Tensor y = call(std::span<const Tensor>(in))[0];
      y.backward(reshape(upstream, y.shape()));
      for (const Tensor& x : in) x.set_grad({});
    });
    for (Tensor& x : in) x.requires_grad_(false);
    return std::pair(forward, both);
  };
  std::string line = fmt::format("{:12}", layer.name);
  const auto add = [&](std::string_view name, std::pair<double, double> t) {
    line += fmt::format(" | {} {:8.1f} {:8.1f}", name, t.first, t.second);
  };
  add("eager", times(layer.step));
  add("replay", times(compile(layer.step)));
  add("partition", times(compile(layer.step, {.executor = Executor::partition})));
  add("fused", times(compile(layer.step, {.executor = Executor::fused})));
  std::cout << line << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Layers of small ops on the CPU; median microseconds forward, and forward and backward");
  int threads = 2;
  std::int64_t rows = 512, columns = 1024;
  bool half = false;
  app.add_option("--threads", threads);
  app.add_option("--rows", rows);
  app.add_option("--columns", columns, "a multiple of 64");
  app.add_flag("--bf16", half);
  CLI11_PARSE(app, argc, argv);
  sherd::Context::current().set_threads(threads);
  const sherd::DType dtype = half ? sherd::bf16 : sherd::f32;
  for (const Layer& layer : layers({rows, columns}, dtype)) measure(layer, {rows, columns}, dtype);
}
