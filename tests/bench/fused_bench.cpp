// Layers written out of small ops: called, and compiled by each executor. torch_fused.py runs the same ones.
//   tests/bench/fused_bench [--threads 2] [--rows 512] [--columns 1024] [--bf16] [--device cuda]
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>

#include "sherd.h"

namespace {

using namespace sherd;

/// Median microseconds of a call; on a GPU of ten at a time, with its work. Kernels that are compiled
/// meanwhile are waited for.
double time_of(Device device, const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  const int each = device.is_cpu() ? 1 : 10, warm = device.is_cpu() ? 5 : 2;
  constexpr int calls = 60;
  std::vector<double> times;
  const auto time = [&](int count) {
    const auto begin = Clock::now();
    for (int i = 0; i < count; ++i) call();
    backend(device.type).synchronize(device);
    return std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / count;
  };
  for (const auto begin = Clock::now(); !device.is_cpu() && Clock::now() - begin < std::chrono::milliseconds(700);)
    time(1);
  for (int i = 0; i < warm + calls; ++i) {
    const double of_call = time(each);
    if (i >= warm) times.push_back(of_call);
  }
  std::ranges::nth_element(times, times.begin() + calls / 2);
  return times[calls / 2];
}

struct Layer {
  const char* name;
  Step step;
};

/// Of two inputs of `shape`, whose columns are a multiple of 64.
std::vector<Layer> layers(const Shape& shape, DType dtype, Device device) {
  const std::int64_t rows = shape[0], heads = shape[1] / 64;
  Tensor gain = to(to(randn({shape[1]}), dtype), device);
  gain.requires_grad_();
  const Tensor cosine = to(to(randn({rows, 1, 64}), dtype), device),
               sine = to(to(randn({rows, 1, 64}), dtype), device);
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

void measure(const Layer& layer, const Shape& shape, DType dtype, Device device) {
  const auto drawn = [&] { return to(to(randn(shape), dtype), device); };
  std::vector<Tensor> in{drawn(), drawn()};
  const Tensor upstream = drawn();
  const auto times = [&](const auto& call) {
    const double forward = time_of(device, [&] {
      const NoGrad guard;
      call(std::span<const Tensor>(in));
    });
    for (Tensor& x : in) x.requires_grad_();
    const double both = time_of(device, [&] {
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
  CLI::App app("Layers of small ops; median microseconds forward, and forward and backward");
  int threads = 2;
  std::int64_t rows = 512, columns = 1024;
  bool half = false;
  app.add_option("--threads", threads);
  app.add_option("--rows", rows);
  app.add_option("--columns", columns, "a multiple of 64");
  app.add_flag("--bf16", half);
  std::string name = "cpu";
  app.add_option("--device", name);
  CLI11_PARSE(app, argc, argv);
  sherd::Context::current().set_threads(threads);
  const sherd::DType dtype = half ? sherd::bf16 : sherd::f32;
  const sherd::Device device = sherd::Device::parse(name);
  for (const Layer& layer : layers({rows, columns}, dtype, device))
    measure(layer, {rows, columns}, dtype, device);
}
