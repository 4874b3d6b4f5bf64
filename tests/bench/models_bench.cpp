// Training steps of whole models on one GPU, in bf16, called, captured and its module compiled with fused
// regions: time and peak memory, a line each.
//   models_bench [resnet] [unet] [vit] [lstm] [transformer] [llama] [lora] [lora_f32]      (all by default)
// torch_models.py prints the same lines of PyTorch's. MODELS_ONCE=1 makes two steps of each and times none:
// for profilers; MODELS_PROFILE=1 prints the called step's time by op instead.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "nn/compile.h"
#include "nn/llama.h"
#include "nn/lora.h"
#include "nn/optimizer.h"
#include "nn/transformer.h"
#include "runtime/context.h"
#include "tests/bench/models.h"
#include "tests/bench/profile.h"

using namespace sherd;

namespace {

constexpr Device gpu = Device::cuda(0);
constexpr TensorOptions half{bf16, gpu}, places{DType::i64, gpu};

cudaMemPool_t pool() {
  cudaMemPool_t pool = nullptr;
  cudaDeviceGetDefaultMemPool(&pool, 0);
  return pool;
}
double peak_gib() {
  std::uint64_t peak = 0;
  cudaMemPoolGetAttribute(pool(), cudaMemPoolAttrUsedMemHigh, &peak);
  return static_cast<double>(peak) / (1 << 30);
}
void reset_peak() {
  std::uint64_t zero = 0;
  cudaMemPoolSetAttribute(pool(), cudaMemPoolAttrUsedMemHigh, &zero);
}

/// Milliseconds a step: the median of five runs of five, of which each ends with its loss on the host.
void report(const std::string& what, const std::function<Tensor()>& step) {
  using Clock = std::chrono::steady_clock;
  constexpr int steps = 5;
  if (std::getenv("MODELS_ONCE") != nullptr) return void((step(), step().item()));
  reset_peak();
  for (int i = 0; i < steps; ++i) step().item();
  std::vector<double> runs;
  double loss = 0;
  for (int run = 0; run < 5; ++run) {
    const auto start = Clock::now();
    Tensor last;
    for (int i = 0; i < steps; ++i) last = step();
    loss = last.item();
    runs.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count() / steps);
  }
  std::sort(runs.begin(), runs.end());
  std::printf("%-24s %9.2f ms %7.1f GiB   loss %.3f\n", what.c_str(), runs[2], peak_gib(), loss);
  std::fflush(stdout);
}

/// `loss_of` of a model and a batch, then a step of its optimizer.
template <class Model, class Optimizer, class Loss>
void time_both_ways(const std::string& name, Model& model, Optimizer& optimizer, const Loss& loss_of,
                    const std::vector<Tensor>& batch) {
  const auto step = [&](std::span<const Tensor> x) {
    const Tensor loss = loss_of(model, x);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    return std::vector<Tensor>{loss.detach()};
  };
  if (std::getenv("MODELS_PROFILE") != nullptr) return bench::profile([&] { step(batch); });
  report(name + " called", [&] { return step(batch)[0]; });
  {
    Program program = capture(step, batch);
    report(name + " captured", [&] { return program.replay(batch)[0]; });
  }
  nn::compile(model, {.executor = Executor::fused});
  report(name + " fused", [&] { return step(batch)[0]; });
}

template <class Model>
Model on_gpu(Model model) {
  model.to(gpu);
  model.to(bf16);
  return model;
}

Tensor classes_loss(const Tensor& logits, const Tensor& target) {
  return cross_entropy(to(logits, f32), target);
}

void resnet() {
  auto model = on_gpu(bench::ResNet50());
  nn::Sgd optimizer(model.parameters(), {.lr = 0.01, .momentum = 0.9});
  time_both_ways("resnet50 256", model, optimizer,
                 [](const auto& m, auto x) { return classes_loss(m(x[0]), x[1]); },
                 {randn({256, 3, 224, 224}, half), randint(0, 1000, {256}, places)});
}

void unet() {
  auto model = on_gpu(bench::UNet());
  nn::Sgd optimizer(model.parameters(), {.lr = 0.01, .momentum = 0.9});
  time_both_ways("unet 16", model, optimizer,
                 [](const auto& m, auto x) { return mean(square(to(m(x[0]), f32))); },
                 {randn({16, 3, 256, 256}, half)});
}

void vit() {
  auto model = on_gpu(bench::VitB());
  nn::AdamW optimizer(model.parameters(), {.lr = 1e-4});
  time_both_ways("vit_b_16 128", model, optimizer,
                 [](const auto& m, auto x) { return classes_loss(m(x[0]), x[1]); },
                 {randn({128, 3, 224, 224}, half), randint(0, 1000, {128}, places)});
}

void lstm() {
  auto model = on_gpu(bench::LstmModel());
  nn::AdamW optimizer(model.parameters(), {.lr = 1e-4});
  time_both_ways("lstm 128 x 64", model, optimizer,
                 [](const auto& m, auto x) { return classes_loss(flatten(m(x[0]), 0, 1), x[1]); },
                 {randint(0, 10000, {128, 64}, places), randint(0, 10000, {128 * 64}, places)});
}

void transformer() {
  auto model = on_gpu(nn::Transformer({.dropout = 0.1, .batch_first = true}));
  nn::AdamW optimizer(model.parameters(), {.lr = 1e-4});
  time_both_ways("transformer 64 x 256", model, optimizer,
                 [](const auto& m, auto x) { return mean(square(to(m(x[0], x[1], nn::Causal::yes), f32))); },
                 {randn({64, 256, 512}, half), randn({64, 256, 512}, half)});
}

/// TinyLlama's sizes: 1.1 billion parameters, 32 heads over 4.
nn::LlamaOptions llama_sizes() {
  return {.vocab_size = 32000,
          .hidden_size = 2048,
          .intermediate_size = 5632,
          .num_hidden_layers = 22,
          .num_attention_heads = 32,
          .num_key_value_heads = 4,
          .max_position_embeddings = 2048,
          .tensor = half};
}
void time_llama(const std::string& name, nn::Llama& model, const std::vector<nn::Parameter>& trained) {
  nn::AdamW optimizer(trained, {.lr = 1e-4});
  time_both_ways(name, model, optimizer,
                 [](const auto& m, auto x) { return cross_entropy(flatten(m(x[0]), 0, 1), x[1]); },
                 {randint(0, 32000, {4, 2048}, places), randint(0, 32000, {4 * 2048}, places)});
}
void llama() {
  nn::Llama model(llama_sizes());
  time_llama("llama_1b 4 x 2048", model, model.parameters());
}
/// Adapters of rank 16 for all its linear layers but the head.
void adapters_of(const std::string& name, DType dtype) {
  nn::Llama model(llama_sizes());
  nn::add_lora(model, {.rank = 16, .alpha = 32, .targets = {"all-linear"}, .dtype = dtype});
  time_llama(name, model, nn::lora_parameters(model));
}
void lora() { adapters_of("lora_1b 4 x 2048", bf16); }
void lora_f32() { adapters_of("lora_1b_f32 4 x 2048", f32); }

struct Named {
  std::string_view name;
  void (*run)();
};
constexpr Named models[] = {
    {"resnet", resnet},           {"unet", unet},   {"vit", vit},   {"lstm", lstm},
    {"transformer", transformer}, {"llama", llama}, {"lora", lora}, {"lora_f32", lora_f32}};

}  // namespace

int main(int count, char** words) {
  const std::vector<std::string_view> asked(words + 1, words + count);
  for (const std::string_view name : asked)
    if (std::ranges::find(models, name, &Named::name) == std::end(models)) {
      std::fprintf(stderr, "models_bench: no model '%s'\n", std::string(name).c_str());
      return 1;
    }
  for (const Named& model : models) {
    if (!asked.empty() && std::ranges::find(asked, model.name) == asked.end()) continue;
    manual_seed(1);
    model.run();
  }
}
