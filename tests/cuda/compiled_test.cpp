// Compiled modules on a GPU have eager's bits, through steps of an optimizer and changes of batch, mode and
// dtype.
#include <limits>
#include <optional>

#include "autograd/autograd.h"
#include "autograd/capture/program.h"
#include "nn/compile.h"
#include "nn/gpt.h"
#include "nn/optimizer.h"
#include "nn/recurrent.h"
#include "nn/transformer.h"
#include "runtime/cuda/region_kernels.h"
#include "tests/cuda/compare.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// Norms whose results go into other ops on each element, as in residual networks.
struct Residual final : nn::Layer<Residual> {
  nn::Conv2d first{16, 16, 3, {.padding = 1}}, second{16, 16, 3, {.padding = 1}}, shortcut{16, 16, 1};
  nn::BatchNorm2d first_norm{16}, second_norm{16}, shortcut_norm{16};
  Tensor forward(const Tensor& x) const {
    const Tensor y = relu(first_norm(first(x)));
    return relu(add(second_norm(second(y)), shortcut_norm(shortcut(x))));
  }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
    on("shortcut", shortcut);
    on("first_norm", first_norm);
    on("second_norm", second_norm);
    on("shortcut_norm", shortcut_norm);
  }
};

struct Convolutions final : nn::Layer<Convolutions> {
  nn::Conv2d first{3, 8, 3, {.padding = 1}}, second{8, 8, 3, {.padding = 1, .groups = 2}};
  nn::BatchNorm2d norm{8};
  nn::Dropout dropout{0.2};
  nn::Linear last{8, 5};
  Tensor forward(const Tensor& x) const {
    Tensor y = relu(norm(first(x)));
    y = max_pool2d(add(y, second(y)), 2);
    return last(dropout(mean(y, {2, 3})));
  }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
    on("norm", norm);
    on("dropout", dropout);
    on("last", last);
  }
};

struct Blocks final : nn::Layer<Blocks> {
  nn::ModuleList<nn::GptBlock> blocks;
  Blocks() {
    for (int i = 0; i < 4; ++i)
      blocks.emplace_back(nn::GptOptions{.heads = 2, .width = 64, .context = 32, .dropout = 0.1});
  }
  Tensor forward(const Tensor& x) const {
    Tensor y = x;
    for (const nn::GptBlock& block : blocks) y = block.forward(y);
    return y;
  }
  void visit(auto&& on) { on("blocks", blocks); }
};

/// Steps of `module`, which give values, gradients and what they drew.
template <class M>
std::vector<std::vector<double>> train(M& module, const Shape& shape, DType dtype) {
  std::vector<std::vector<double>> all;
  const auto keep = [&](const Tensor& t) {
    all.push_back(t.defined() ? to(to(t.detach(), Device::cpu()), f64).to_vector<double>()
                              : std::vector<double>{});
  };
  nn::Sgd optimizer(module.parameters(), {.lr = 0.02, .momentum = 0.5});
  manual_seed(5);
  for (int step = 0; step < 7; ++step) {
    if (step == 5) module.eval();
    Shape sizes = shape;
    if (step % 3 == 2) sizes[0] += 1;
    Tensor x = to(to(randn(sizes), dtype), gpu).requires_grad_();
    const Tensor y = module(x);
    keep(y);
    if (step != 3) mean(square(to(y, f32))).backward();
    keep(x.grad());
    CHECK(isfinite(sum(to(y, f32))).item() != 0);
    for (const nn::Parameter& p : module.parameters()) keep(p.grad()), keep(p.local());
    optimizer.step();
    optimizer.zero_grad();
    keep(randn({2}, {f32, gpu}));
  }
  return all;
}

template <class M, class F>
void expect_same(const char* name, F&& make, const Shape& shape, MemoryBudget budget = {}) {
  for (const DType dtype : {f32, bf16, f16}) {
    INFO(name << ' ' << name_of(dtype));
    const auto run = [&](std::optional<Executor> executor) {
      manual_seed(3);
      M module = make();
      module.to(dtype);
      module.to(gpu);
      if (executor) nn::compile(module, {.executor = *executor, .memory = budget});
      auto all = train(module, shape, dtype);
      if (executor) {
        CHECK(nn::compiled_programs(module).stats().hits > 0);
        CHECK(nn::compiled_programs(module).stats().eager == 0);
      }
      return all;
    };
    const auto expected = run({});
    CHECK(run(Executor::replay) == expected);
    CHECK(run(Executor::fused) == expected);
    CHECK(cuda::finish_region_kernels().failed == 0);
    CHECK(run(Executor::fused) == expected);  // by kernels from the first replay on
  }
}

}  // namespace

TEST_CASE("cuda: compiled modules train with eager's bits") {
  if (no_gpu()) return;
  expect_same<Convolutions>("convolutions", [] { return Convolutions{}; }, {4, 3, 8, 8});
  expect_same<Residual>("residual block", [] { return Residual{}; }, {4, 16, 8, 8});
  expect_same<nn::TransformerEncoderLayer>(
      "encoder layer",
      [] {
        return nn::TransformerEncoderLayer({.width = 32, .heads = 4, .feedforward = 64, .dropout = 0.1});
      },
      {5, 3, 32});
  expect_same<nn::Sequential>(
      "perceptron",
      [] { return nn::Sequential(nn::Linear(16, 32), nn::Gelu(), nn::LayerNorm(32), nn::Linear(32, 4)); },
      {6, 16});
}

TEST_CASE("cuda: at budgets of memory compiled modules train with eager's bits") {
  if (no_gpu()) return;
  for (const MemoryBudget& budget : {MemoryBudget::part(0.8), MemoryBudget::least()})
    expect_same<Blocks>("blocks", [] { return Blocks{}; }, {3, 32, 64}, budget);
}

TEST_CASE("cuda: what a step takes there falls with its budget of memory") {
  if (no_gpu()) return;
  for (const Executor executor : {Executor::replay, Executor::fused}) {
    std::int64_t before_it = std::numeric_limits<std::int64_t>::max();
    for (const MemoryBudget& budget :
         {MemoryBudget::part(1), MemoryBudget::part(0.7), MemoryBudget::least()}) {
      Blocks module;
      module.to(bf16);
      module.to(gpu);
      nn::compile(module, {.executor = executor, .memory = budget});
      const Tensor x = to(to(randn({16, 32, 64}), bf16), gpu), gy = to(to(randn({16, 32, 64}), bf16), gpu);
      const auto step = [&] {
        module(x).backward(gy);
        module.zero_grad();
      };
      for (int i = 0; i < 2; ++i) step();
      cuda::finish_region_kernels();
      step();
      free_halves_workspace();
      MemoryLedger& ledger = Context::current().memory();
      const std::int64_t before = ledger.held(DeviceType::cuda).total();
      ledger.reset_peak(DeviceType::cuda);
      {
        Tensor y = module(x);
        std::exchange(y, {}).backward(gy);
      }
      const CompileStats stats = nn::compiled_programs(module).stats();
      INFO("executor " << static_cast<int>(executor) << ", eager " << stats.eager_peak_bytes);
      // Kernels have some memory of their own while they run.
      const std::int64_t taken = ledger.peak(DeviceType::cuda) - before;
      CHECK(taken >= stats.peak_bytes);
      CHECK(taken < before_it);
      before_it = taken;
      WARN(taken << " bytes taken, " << stats.peak_bytes << " of them values");
      module.zero_grad();
    }
  }
}
