// Blocks of a Gpt by budgets of memory, beside eager ones and such as run each block again in the backward.
//   tests/bench/budget_bench [--threads 2] [--blocks 12] [--width 128] [--heads 4] [--context 128] [--batch
//   8] [--bf16]
//                            [--device cuda]
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>

#include "sherd.h"

namespace {

using namespace sherd;

struct Blocks final : nn::Layer<Blocks> {
  nn::ModuleList<nn::GptBlock> blocks;
  bool each_again = false;
  Blocks(std::int64_t count, const nn::GptOptions& options) {
    for (std::int64_t i = 0; i < count; ++i) blocks.emplace_back(options);
  }
  Tensor forward(Tensor x) const {
    for (const nn::GptBlock& block : blocks)
      x = each_again ? recompute([&] { return block.forward(x); }) : block.forward(x);
    return mean(square(x));
  }
  void visit(auto&& on) { on("blocks", blocks); }
};

struct Figures {
  double first_ms = 0, median_ms = 0;
  std::int64_t peak = 0;  // bytes that the step held beyond what it began with
};

Figures measure(Device device, const std::function<void()>& step) {
  constexpr int steps = 11;
  Figures figures;
  std::vector<double> times;
  MemoryLedger& ledger = Context::current().memory();
  for (int i = 0; i <= steps; ++i) {
    ledger.reset_peak(device.type);
    const std::int64_t before = ledger.held(device.type).total();
    const auto begin = std::chrono::steady_clock::now();
    step();
    backend(device.type).synchronize(device);
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    figures.peak = ledger.peak(device.type) - before;
    if (i == 0)
      figures.first_ms = time.count();
    else
      times.push_back(time.count());
  }
  std::ranges::nth_element(times, times.begin() + steps / 2);
  figures.median_ms = times[steps / 2];
  return figures;
}

void print(std::string_view name, const Figures& figures, std::int64_t peak, double plain_ms) {
  std::cout << fmt::format("{:16} | peak {:8.1f} MB | {:8.1f} ms, {:.3f} of eager | first step {:8.1f} ms",
                           name, static_cast<double>(peak) / 1e6, figures.median_ms,
                           figures.median_ms / plain_ms, figures.first_ms)
            << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Blocks of a Gpt by budgets of memory; medians of a forward and a backward");
  int threads = 2;
  std::int64_t blocks = 12, batch = 8;
  nn::GptOptions options;
  app.add_option("--threads", threads);
  app.add_option("--blocks", blocks);
  app.add_option("--width", options.width);
  app.add_option("--context", options.context);
  app.add_option("--batch", batch);
  app.add_option("--heads", options.heads);
  bool half = false;
  app.add_flag("--bf16", half);
  std::string name_of_device = "cpu";
  app.add_option("--device", name_of_device);
  CLI11_PARSE(app, argc, argv);
  Context::current().set_threads(threads);
  const Device device = Device::parse(name_of_device);
  const DType dtype = half ? bf16 : f32;
  Blocks model(blocks, options);
  model.to(dtype);
  model.to(device);
  const Tensor x = to(to(randn({batch, options.context, options.width}), dtype), device);
  const auto step = [&] {
    model(x).backward();
    model.zero_grad();
  };
  measure(device, step);
  const Figures plain = measure(device, step);
  print("eager", plain, plain.peak, plain.median_ms);
  model.each_again = true;
  const Figures again = measure(device, step);
  print("each block again", again, again.peak, plain.median_ms);
  model.each_again = false;
  for (const Executor executor : {Executor::replay, Executor::fused})
    for (const double part : {1.0, 0.75, 0.5, 0.4, 0.3, 0.0}) {
      const Compiled compiled = compile(
          [&](std::span<const Tensor> in) { return std::vector<Tensor>{model.forward(in[0])}; },
          {.executor = executor, .memory = part > 0 ? MemoryBudget::part(part) : MemoryBudget::least()});
      const std::string name = fmt::format("{} {}", executor == Executor::replay ? "replay" : "fused",
                                           part > 0 ? fmt::format("{}", part) : std::string("least"));
      try {
        const Figures figures = measure(device, [&] {
          compiled({x})[0].backward();
          model.zero_grad();
        });
        print(name, figures, compiled.stats().peak_bytes, plain.median_ms);
      } catch (const ValueError& error) {
        std::cout << fmt::format("{:16} | {}", name, error.what()) << std::endl;
      }
    }
}
