// Kernels and GPT-2-shaped training steps on one GPU; one line a figure. torch_cuda.py prints the same lines.
//   cuda_bench [kernels] [tf32] [small] [parity FILE] [step BATCH] [d48 BATCH] [d48fp8 BATCH] [d48fp8rows
//   BATCH] [profile BATCH]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "nn/compile.h"
#include "nn/gpt.h"
#include "nn/layers.h"
#include "nn/optimizer.h"
#include "nn/state_file.h"
#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/float32_precision.h"
#include "runtime/ops/attention.h"
#include "runtime/ops/cross_entropy.h"
#include "runtime/ops/layer_norm.h"
#include "runtime/ops/linear_gelu.h"
#include "runtime/ops/optimizer_steps.h"
#include "runtime/ops/picking.h"
#include "runtime/ops/softmax.h"
#include "tests/bench/mlp.h"
#include "tests/bench/profile.h"

using namespace sherd;

namespace {

constexpr Device gpu = Device::cuda(0);
constexpr TensorOptions half{bf16, gpu}, single{f32, gpu};

void wait() { backend(DeviceType::cuda).synchronize(gpu); }

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Microseconds a call; the median of five runs.
template <class F>
double microseconds(const F& body, int calls = 10) {
  for (int i = 0; i < 3; ++i) body();
  wait();
  std::vector<double> runs;
  for (int run = 0; run < 5; ++run) {
    const double start = now();
    for (int i = 0; i < calls; ++i) body();
    wait();
    runs.push_back((now() - start) / calls * 1e6);
  }
  std::sort(runs.begin(), runs.end());
  return runs[2];
}

template <class F>
void report(const std::string& what, double gigabytes, const F& body, int calls = 10) {
  const double us = microseconds(body, calls);
  std::printf("%-44s %10.1f us  %7.2f TB/s\n", what.c_str(), us, gigabytes / us * 1e3);
  std::fflush(stdout);
}

void attention_bench(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t d) {
  const Tensor qkv = randn({b, t, 3 * h * d}, half), go = randn({b, t, h * d}, half);
  const ops::AttentionRule rule{1 / std::sqrt(static_cast<double>(d)), true, 0, {}};
  const Tensors out = apply_many(ops::SelfAttention{h, rule}, std::span(&qkv, 1));
  const double tera = 4.0 * static_cast<double>(b * h * t * t * d) / 2 / 1e12;
  const double forward = microseconds([&] { apply_many(ops::SelfAttention{h, rule}, std::span(&qkv, 1)); });
  const Tensor in[] = {go, qkv, out[0], out[1]};
  const double backward = microseconds([&] { apply_many(ops::SelfAttentionGrad{h, rule}, in); });
  std::printf("attention %3lld %3lld %5lld %4lld causal forward    %10.1f us  %7.1f TFLOP/s\n", (long long)b,
              (long long)h, (long long)t, (long long)d, forward, tera / forward * 1e6);
  std::printf("attention %3lld %3lld %5lld %4lld causal backward   %10.1f us  %7.1f TFLOP/s\n", (long long)b,
              (long long)h, (long long)t, (long long)d, backward, 2.5 * tera / backward * 1e6);
  std::fflush(stdout);
}

void kernels() {
  const NoGrad guard;
  constexpr std::int64_t rows = 65536;
  {
    const Tensor x = randn({1 << 29}, half);
    report("copy 1 GB", 4.0 * (1 << 29) / 1e9, [&] { clone(x); });
  }
  for (std::int64_t d : {768, 1600, 4096}) {
    const Tensor x = randn({rows, d}, half), gy = randn({rows, d}, half), w = randn({d}, half),
                 b = randn({d}, half);
    const double gb = 2.0 * static_cast<double>(rows * d) / 1e9;
    const std::string size = " " + std::to_string(d);
    const Tensor in[] = {x, w, b};
    const Tensors out = apply_many(ops::LayerNorm{}, in);
    report("layer_norm forward" + size, 2 * gb, [&] { apply_many(ops::LayerNorm{}, in); });
    const Tensor back[] = {gy, x, w, out[1], out[2], {}};
    report("layer_norm backward" + size, 3 * gb, [&] { apply_many(ops::LayerNormGrad{}, back); });
    const Tensor round[] = {gy, x, w, out[1], out[2], randn({rows, d}, half)};
    report("layer_norm backward, stream and sums" + size, 4 * gb,
           [&] { apply_many(ops::LayerNormGradSums{}, round); });
    report("gelu forward" + size, 2 * gb, [&] { gelu(x); });
    const Tensor both[] = {gy, x};
    report("gelu backward, summed" + size, 3 * gb, [&] { apply_many(ops::GeluGradSums{}, both); });
    report("add" + size, 3 * gb, [&] { add(x, gy); });
    report("sum of rows" + size, gb, [&] { sum(x, {0}); });
  }
  {
    const Tensor x = randn({rows, 1024}, half), gy = randn({rows, 1024}, half), y = softmax(x);
    const double gb = 2.0 * rows * 1024 / 1e9;
    report("softmax forward 1024", 2 * gb, [&] { softmax(x); });
    report("softmax backward 1024", 3 * gb, [&] { apply(ops::SoftmaxGrad{}, y, gy); });
  }
  {
    constexpr std::int64_t vocab = 50304;
    const Tensor logits = randn({rows, vocab}, half), targets = randint(0, vocab, {rows}, {i64, gpu});
    const Tensor in[] = {logits, targets};
    const Tensors out = apply_many(ops::CrossEntropy{}, in);
    const Tensor back[] = {ones({}, half), logits, targets, out[1], out[2]};
    const double gb = 2.0 * rows * vocab / 1e9;
    report("cross_entropy forward 50304", gb, [&] { apply_many(ops::CrossEntropy{}, in); }, 3);
    report("cross_entropy backward 50304", 2 * gb, [&] { apply_many(ops::CrossEntropyGrad{}, back); }, 3);
    report("cross_entropy both in one pass 50304", 2 * gb, [&] { cross_entropy_(logits, targets); }, 3);
  }
  {
    const Tensor table = randn({50304, 768}, half), index = randint(0, 50257, {rows}, {i64, gpu}),
                 gy = randn({rows, 768}, half);
    const double gb = 2.0 * rows * 768 / 1e9;
    report("embedding forward 768", 2 * gb, [&] { embedding(table, index); });
    report("embedding backward 768", gb + 2.0 * 50304 * 768 / 1e9,
           [&] { apply(ops::PutAt{{}, Put::add, table.shape()}, Tensor{}, index, gy); });
  }
  attention_bench(64, 12, 1024, 64);
  attention_bench(16, 25, 1024, 64);
  attention_bench(4, 32, 2048, 128);
  {
    constexpr std::int64_t n = 1 << 29;
    std::vector<Tensor> in{Tensor::scalar(1e-3, {f64, gpu})};
    for (int i = 0; i < 4; ++i) in.push_back(full({n}, 1e-3, single));
    in.push_back(zeros({}, {f64, gpu}));
    report(
        "adamw 512 M", 28.0 * n / 1e9,
        [&] { apply_many(ops::AdamStep{.weight_decay = 0.1, .decoupled = true}, in); }, 3);
    const Tensor g = in[2];
    report("order_free_norm 512 M", 8.0 * n / 1e9, [&] { order_free_norm(std::span(&g, 1)); }, 3);
  }
}

/// How far `f` of f32 in each precision lies from `f` of f64, by element and of all, in units of a typical
/// element (the root mean square), and its time.
template <class F>
void precision_bench(const char* what, double tera, const std::vector<Tensor>& in, const F& f) {
  const auto magnitude = [](const Tensor& t) { return norm(t).item() / std::sqrt(t.numel()); };
  const Tensor exact = f(to(in[0], f64), to(in[1], f64));
  for (const auto precision : {Float32MatmulPrecision::highest, Float32MatmulPrecision::high}) {
    const Float32MatmulPrecisionScope scope(precision);
    const Tensor off = sub(to(f(in[0], in[1]), f64), exact);
    const double unit = magnitude(exact), largest = amax(abs(off)).item() / unit,
                 typical = magnitude(off) / unit;
    const double us = microseconds([&] { f(in[0], in[1]); });
    std::printf("%-34s %-8s off by %.1e at most, %.1e typically %10.1f us %7.1f TFLOP/s\n", what,
                precision == Float32MatmulPrecision::high ? "high" : "highest", largest, typical, us,
                tera / us * 1e6);
    std::fflush(stdout);
  }
}

void tf32() {
  const NoGrad guard;
  constexpr std::int64_t n = 4096;
  const auto t = [](std::int64_t multiplications) {
    return 2.0 * static_cast<double>(multiplications) / 1e12;
  };
  precision_bench("matmul 4096 x 4096 x 4096", t(n * n * n), {randn({n, n}, single), randn({n, n}, single)},
                  [](const Tensor& a, const Tensor& b) { return matmul(a, b); });
  precision_bench("linear 1024 to 4096, 8192 rows", t(8192 * 1024 * n),
                  {randn({8192, 1024}, single), randn({n, 1024}, single)},
                  [](const Tensor& x, const Tensor& w) { return linear(x, w); });
  precision_bench("conv2d 3x3, 64 channels, 32 x 56^2", t(std::int64_t{32} * 56 * 56 * 64 * 64 * 9),
                  {randn({32, 64, 56, 56}, single), randn({64, 64, 3, 3}, single)},
                  [](const Tensor& x, const Tensor& w) { return conv2d(x, w, {}, {.padding = 1}); });
}

/// What the driver's pools hold, and the most that they held.
std::string memory_used() {
  cudaMemPool_t pool = nullptr;
  std::uint64_t used = 0, peak = 0, graphs = 0;
  cudaDeviceGetDefaultMemPool(&pool, 0);
  cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used);
  cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &peak);
  cudaDeviceGetGraphMemAttribute(0, cudaGraphMemAttrUsedMemHigh, &graphs);
  const auto gib = [](std::uint64_t bytes) { return static_cast<double>(bytes) / (1 << 30); };
  char text[96];
  std::snprintf(text, sizeof text, "%.2f GiB, peak %.2f, in graphs %.2f", gib(used), gib(peak), gib(graphs));
  return text;
}

/// Layers, width and heads as GPT-2's.
struct Size {
  const char* name;
  std::int64_t layers, width, heads;
  nn::Products products = nn::Products::as_given;
};
constexpr Size d12{"d12", 12, 768, 12}, d48{"d48", 48, 1600, 25},
    d48_fp8{"d48 in fp8", 48, 1600, 25, nn::Products::fp8},
    d48_fp8_rows{"d48 in fp8, rows scaled", 48, 1600, 25, nn::Products::fp8_rows};

/// A Gpt in bf16 whose optimizer keeps f32 masters.
class GptStep {
 public:
  GptStep(const Size& size, std::int64_t batch)
      : batch_(batch),
        model_({.layers = size.layers,
                .heads = size.heads,
                .width = size.width,
                .context = length,
                .vocab = vocab,
                .tensor = half,
                .products = size.products}),
        optimizer_(model_.parameters(),
                   {.lr = 3e-4, .beta2 = 0.95, .weight_decay = 0.1, .masters = nn::Masters::in_f32}),
        tokens_(randint(0, 50257, {batch, length}, {i64, gpu})),
        targets_(randint(0, 50257, {batch * length}, {i64, gpu})),
        parameters_(model_.parameters()) {}
  void load(const nn::StateDict& weights) { model_.load_state_dict(weights); }
  void compile(Executor executor) { nn::compile(model_, {.executor = executor}); }

  Tensor operator()() { return (*this)(tokens_, targets_); }
  /// tokens (batch, length), targets (batch length).
  Tensor operator()(const Tensor& tokens, const Tensor& targets) {
    Tensor logits = reshape(model_(tokens), {batch_ * length, vocab});
    const LossPrecision precision = exact ? LossPrecision::wide : LossPrecision::of_logits;
    const Tensor loss = cross_entropy_(std::exchange(logits, {}), targets, {.precision = precision});
    loss.backward();
    optimizer_.step_clipped(nn::grad_norm(parameters_), 1.0);
    optimizer_.zero_grad();
    return loss;
  }
  std::int64_t tokens() const { return batch_ * length; }

  static constexpr std::int64_t length = 1024, vocab = 50304;

  bool exact = false;  ///< the loss in f32, as one who compares losses wants it

 private:
  std::int64_t batch_;
  nn::Gpt model_;
  nn::AdamW optimizer_;
  Tensor tokens_, targets_;
  std::vector<nn::Parameter> parameters_;
};

void step_bench(const Size& size, std::int64_t batch) {
  GptStep step(size, batch);
  const double first = step().item();
  const auto print = [&](const char* how, double us, double last) {
    std::printf("%s step, batch %lld, %s: %.2f ms, %.1f k tokens/s, loss %.3f to %.3f, %s\n", size.name,
                (long long)batch, how, us / 1e3, static_cast<double>(step.tokens()) / us * 1e3, first, last,
                memory_used().c_str());
    std::fflush(stdout);
  };
  const double eager = microseconds([&] { step(); }, 4);
  print("eager", eager, step().item());
  for (const Executor executor : {Executor::replay, Executor::fused}) {
    GptStep compiled(size, batch);
    compiled.compile(executor);
    for (int i = 0; i < 3; ++i) compiled();
    const double us = microseconds([&] { compiled(); }, 4);
    print(executor == Executor::replay ? "compiled" : "fused", us, compiled().item());
  }
  for (const Executor executor : {Executor::replay, Executor::fused}) {
    const auto begin = std::chrono::steady_clock::now();
    Program program = capture([&](std::span<const Tensor>) { return std::vector{step()}; }, {}, executor);
    program.replay({});
    sherd::backend(DeviceType::cuda).synchronize(gpu);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const double replayed = microseconds([&] { program.replay({}); }, 4);
    const std::string how = std::string(program.is_device_graph() ? "graph" : "captured") +
                            (executor == Executor::fused ? ", fused" : "");
    print(how.c_str(), replayed, program.replay({})[0].item());
    // Two steps are within.
    std::printf("captured and replayed once in %.2f s, workspace of the program %.2f GiB\n", seconds,
                static_cast<double>(program.workspace_bytes()) / (1 << 30));
  }
}

/// Trains from the weights and on the batches that torch_cuda.py wrote; how far losses are from PyTorch's.
void parity(const std::string& path) {
  nn::StateDict state = nn::load_state(path);
  const auto words = std::ranges::find(state, "words", &std::pair<std::string, Tensor>::first);
  const Tensor batches = to(words->second, gpu);
  state.erase(words);
  const std::int64_t batch = batches.size(1), length = GptStep::length;
  GptStep step(d12, batch);
  step.exact = true;
  step.load(state);
  std::ifstream theirs(path + ".losses");
  std::vector<Tensor> losses;
  std::vector<double> narrow, wide;
  for (double a = 0, b = 0; theirs >> a >> b;) {
    narrow.push_back(a);
    wide.push_back(b);
    const Tensor w = select(batches, 0, static_cast<std::int64_t>(losses.size()) % batches.size(0));
    losses.push_back(step(contiguous(slice(w, 1, 0, length)),
                          reshape(contiguous(slice(w, 1, 1, length + 1)), {batch * length})));
  }
  double ours_most = 0, theirs_most = 0, ours_square = 0, theirs_square = 0;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    const double loss = losses[i].item(), ours = std::abs(loss - wide[i]),
                 other = std::abs(narrow[i] - wide[i]);
    ours_most = std::max(ours_most, ours);
    theirs_most = std::max(theirs_most, other);
    ours_square += ours * ours;
    theirs_square += other * other;
    if (i % 11 == 0)
      std::printf("step %3zu: %.4f; PyTorch bf16 %.4f, f32 %.4f\n", i, loss, narrow[i], wide[i]);
  }
  const auto n = static_cast<double>(losses.size());
  std::printf(
      "distance of losses from PyTorch's in f32 over %.0f steps, most and root mean square: Sherd bf16 %.4f "
      "%.4f, "
      "PyTorch bf16 %.4f %.4f\n",
      n, ours_most, std::sqrt(ours_square / n), theirs_most, std::sqrt(theirs_square / n));
  std::fflush(stdout);
}

/// Three MLP(16) with AdamW, batch 4.
void small() {
  nn::Sequential model(bench::Mlp{}, bench::Mlp{}, bench::Mlp{});
  model.to(gpu);
  nn::AdamW optimizer(model.parameters(), {.lr = 1e-2});
  const Tensor x = randn({4, 16}, single);
  const Step step = [&](std::span<const Tensor> in) {
    const Tensor loss = sum(model(in[0]));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    return std::vector{loss};
  };
  std::printf("three MLP(16), AdamW, eager %.1f us\n", microseconds([&] { step(std::span(&x, 1)); }, 200));
  for (const Executor executor : {Executor::replay, Executor::fused}) {
    Program program = capture(step, {x}, executor);
    const double us = microseconds([&] { program.replay({x}); }, 200);
    std::printf("three MLP(16), AdamW, %s%s %.1f us\n", executor == Executor::fused ? "fused, " : "",
                program.is_device_graph() ? "graph" : "captured", us);
  }
  const Tensor a = randn({16}, single), b = randn({16}, single);
  const NoGrad guard;
  std::printf("a + b, 16 elements: %.2f us; in place %.2f us; memory alone %.2f us\n",
              microseconds([&] { add(a, b); }, 1000), microseconds([&] { add_(a, b); }, 1000),
              microseconds([&] { empty({16}, single); }, 1000));
  std::fflush(stdout);
}

void profile(std::int64_t batch) {
  GptStep step(d12, batch);
  bench::profile([&] { step(); });
}

}  // namespace

int main(int count, char** arguments) {
  manual_seed(1);
  for (int i = 1; i < count; ++i) {
    if (std::strcmp(arguments[i], "kernels") == 0) kernels();
    if (std::strcmp(arguments[i], "tf32") == 0) tf32();
    if (std::strcmp(arguments[i], "step") == 0) step_bench(d12, std::atoll(arguments[++i]));
    if (std::strcmp(arguments[i], "d48") == 0) step_bench(d48, std::atoll(arguments[++i]));
    if (std::strcmp(arguments[i], "d48fp8") == 0) step_bench(d48_fp8, std::atoll(arguments[++i]));
    if (std::strcmp(arguments[i], "d48fp8rows") == 0) step_bench(d48_fp8_rows, std::atoll(arguments[++i]));
    if (std::strcmp(arguments[i], "small") == 0) small();
    if (std::strcmp(arguments[i], "parity") == 0) parity(arguments[++i]);
    if (std::strcmp(arguments[i], "profile") == 0) profile(std::atoll(arguments[++i]));
  }
}
