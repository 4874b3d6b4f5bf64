// Ranks with a GPU each: calls by size, training steps of sharded GPT-2 shapes and of small models; one line
// a figure. torch_cuda_ranks.py prints the same lines.
//   cuda_ranks_bench [--ranks N] [calls] [small] [parity] [host] [d12 BATCH] [d48 BATCH] [g67 BATCH]
//                    [offload BATCH]
// parity prints the losses of 100 steps of d12 on a batch of 8, of which each rank has its share.
// Threads of this process, or processes of a launcher (mpirun -n N cuda_ranks_bench ...).
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "autograd/capture/capture.h"
#include "collectives/world.h"
#include "nn/gpt.h"
#include "nn/layers.h"
#include "nn/optimizer.h"
#include "nn/transformer.h"
#include "runtime/backend.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/ops/cross_entropy.h"
#include "runtime/timeline.h"
#include "shard/fully_shard.h"
#include "shard/step_in_backward.h"
#include "tests/bench/mlp.h"
#include "tests/rank_device.h"

using namespace sherd;

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// A rank and its GPU.
struct Place {
  World& world;
  Device gpu = test::rank_device("cuda:each");

  const Group& group() const { return world.group(); }
  bool speaks() const { return world.rank() == 0; }
  void wait() const { backend(DeviceType::cuda).synchronize(gpu); }
};

struct Time {
  double us = 0;       ///< a call, the work on the device included
  double host_us = 0;  ///< until the host is free again
};

/// The medians of five runs of `calls` calls, which all ranks make.
template <class F>
Time time_of(const Place& place, const F& body, int calls) {
  for (int i = 0; i < 3; ++i) body();
  std::vector<double> whole, host;
  for (int run = 0; run < 5; ++run) {
    place.wait();
    place.group().barrier();
    const double start = now();
    for (int i = 0; i < calls; ++i) body();
    host.push_back((now() - start) / calls * 1e6);
    place.wait();
    whole.push_back((now() - start) / calls * 1e6);
  }
  std::ranges::sort(whole);
  std::ranges::sort(host);
  return {whole[2], host[2]};
}

void calls(const Place& place) {
  const int ranks = place.world.size();
  if (place.speaks())
    std::printf("%14s %24s %24s %24s   us (host), bf16, %d ranks\n", "bytes", "all_gather", "reduce_scatter",
                "all_reduce", ranks);
  for (std::int64_t bytes = 4 << 10; bytes <= std::int64_t{1} << 30; bytes *= 4) {
    const std::int64_t whole = bytes / 2, part = whole / ranks;
    const Tensor all = randn({part * ranks}, {bf16, place.gpu}), one = randn({part}, {bf16, place.gpu});
    const int count = static_cast<int>(std::clamp<std::int64_t>((std::int64_t{1} << 30) / bytes, 4, 100));
    const Time gather = time_of(place, [&] { place.group().all_gather(all, one); }, count);
    const Time scatter = time_of(place, [&] { place.group().reduce_scatter(one, all); }, count);
    const Time reduce = time_of(place, [&] { place.group().all_reduce(all, ReduceOp::average()); }, count);
    if (!place.speaks()) continue;
    std::printf("%14lld", static_cast<long long>(bytes));
    for (const Time& t : {gather, scatter, reduce}) std::printf(" %13.1f (%8.1f)", t.us, t.host_us);
    std::printf("\n");
    std::fflush(stdout);
  }
}

/// How long the rank's stream stood still for its peers while this existed: around each wait for a call the
/// device marks when it came there and when it went on.
class Waits final : public Timeline {
 public:
  explicit Waits(Device gpu) : gpu_(gpu) { Context::current().set_timeline(this); }
  ~Waits() override { Context::current().set_timeline(nullptr); }
  Waits(const Waits&) = delete;
  Waits& operator=(const Waits&) = delete;

  void begin(std::string_view kind, std::string_view) override {
    open_.push_back(kind == "wait" ? backend(gpu_.type).mark(gpu_) : nullptr);
  }
  void end() noexcept override {
    if (open_.back()) waits_.emplace_back(std::move(open_.back()), backend(gpu_.type).mark(gpu_));
    open_.pop_back();
  }
  /// Milliseconds; when the device has come here.
  double total() const {
    double seconds = 0;
    for (const auto& [from, to] : waits_) {
      to->wait();
      seconds += to->seconds_since(*from);
    }
    return seconds * 1e3;
  }

 private:
  Device gpu_;
  std::vector<std::unique_ptr<DeviceMark>> open_;
  std::vector<std::pair<std::unique_ptr<DeviceMark>, std::unique_ptr<DeviceMark>>> waits_;
};

/// The most that the driver's pool held, in GiB.
double peak_memory(Device gpu) {
  cudaMemPool_t pool = nullptr;
  std::uint64_t peak = 0;
  cudaDeviceGetDefaultMemPool(&pool, gpu.index);
  cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &peak);
  return static_cast<double>(peak) / (1 << 30);
}
void forget_peak(Device gpu) {
  cudaMemPool_t pool = nullptr;
  std::uint64_t none = 0;
  cudaDeviceGetDefaultMemPool(&pool, gpu.index);
  cudaMemPoolSetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &none);
}

/// Times `step` as it is and as a recording; `tokens`: of all ranks, 0 for none to count.
void time_step(const Place& place, const std::string& what, std::int64_t tokens, int calls,
               const std::function<Tensor()>& step) {
  const double first = step().item();
  forget_peak(place.gpu);
  const auto measure = [&](const char* how, const std::function<void()>& body, const auto& last) {
    const Time t = time_of(place, body, calls);
    const std::string line = what + ", " + std::to_string(place.world.size()) + " ranks, " + how;
    const double loss = last();
    if (place.speaks()) {
      std::printf("%s: %.3f ms (host %.3f)", line.c_str(), t.us / 1e3, t.host_us / 1e3);
      if (tokens > 0)
        std::printf(", %.1f k tokens/s, loss %.3f to %.3f, peak %.1f GiB",
                    static_cast<double>(tokens) / t.us * 1e3, first, loss, peak_memory(place.gpu));
      std::printf("\n");
    }
    if (tokens > 0) {  // a small step's marks would take longer than what is between them
      const Waits waits(place.gpu);
      for (int i = 0; i < calls; ++i) body();
      const double waited = waits.total() / calls;
      if (place.speaks())
        std::printf("%s: the device waits %.2f ms for peers, %.1f %%\n", line.c_str(), waited,
                    waited / t.us * 1e5);
    }
    std::fflush(stdout);
  };
  measure("eager", [&] { step(); }, [&] { return step().item(); });
  Program program = capture([&](std::span<const Tensor>) { return std::vector{step()}; }, {});
  measure(
      program.is_device_graph() ? "graph" : "captured", [&] { program.replay({}); },
      [&] { return program.replay({})[0].item(); });
}

/// Layers, width and heads as GPT-2's.
struct Size {
  const char* name;
  std::int64_t layers, width, heads, length = 1024;
};
constexpr Size sizes[] = {{"d12", 12, 768, 12}, {"d48", 48, 1600, 25}, {"g67", 32, 4096, 32, 2048}};

/// Where a model's parameters are: in shards on the GPU or on the host, or whole.
enum class Kept { in_shards, in_shards_of_the_host, whole };

/// A Gpt whose shards are f32, gathered as bf16 and reduced in f32; or whole, in bf16 with f32 beside.
class GptStep {
 public:
  GptStep(const Place& place, const Size& size, LossPrecision precision, Kept kept = Kept::in_shards)
      : precision_(precision),
        model_({.layers = size.layers,
                .heads = size.heads,
                .width = size.width,
                .context = size.length,
                .vocab = vocab,
                .tensor = {kept == Kept::whole ? bf16 : f32,
                           kept == Kept::in_shards_of_the_host ? Device::cpu() : place.gpu}}) {
    shard::Options options{.mesh = place.world.mesh(),
                           .mixed_precision = {.param_dtype = bf16, .reduce_dtype = f32}};
    if (kept == Kept::in_shards_of_the_host) {
      options.cpu_offload = true;
      options.device = place.gpu;
    }
    if (kept != Kept::whole) {
      for (nn::GptBlock& block : model_.blocks) shard::fully_shard(block, options);
      shard::fully_shard(model_, options);
    }
    parameters_ = model_.parameters();
    optimizer_.emplace(parameters_, nn::AdamWOptions{.lr = 3e-4,
                                                     .beta2 = 0.95,
                                                     .weight_decay = 0.1,
                                                     .masters = kept == Kept::whole ? nn::Masters::in_f32
                                                                                    : nn::Masters::none});
  }
  /// tokens (batch, length), targets (batch length).
  Tensor operator()(const Tensor& tokens, const Tensor& targets) {
    const Tensor loss = backward(tokens, targets);
    shard::clip_grad_norm_(parameters_, 1);
    optimizer_->step();
    optimizer_->zero_grad();
    return loss;
  }
  /// The same without clipping; `within`: the optimizer steps within the backward.
  void unclipped(const Tensor& tokens, const Tensor& targets, bool within) {
    if (within && !within_) within_.emplace(*optimizer_);
    backward(tokens, targets);
    if (!within) optimizer_->step();
    optimizer_->zero_grad();
  }
  static constexpr std::int64_t vocab = 50304;

 private:
  Tensor backward(const Tensor& tokens, const Tensor& targets) {
    Tensor logits = reshape(model_(tokens), {targets.numel(), vocab});
    const Tensor loss = cross_entropy_(std::exchange(logits, {}), targets, {.precision = precision_});
    loss.backward();
    return loss.detach();
  }

  LossPrecision precision_;
  nn::Gpt model_;
  std::vector<nn::Parameter> parameters_;
  std::optional<nn::AdamW> optimizer_;
  std::optional<shard::StepInBackward> within_;
};

void gpt(const Place& place, const Size& size, std::int64_t batch) {
  manual_seed(1);
  GptStep step(place, size, LossPrecision::of_logits);
  manual_seed(100 + static_cast<std::uint64_t>(place.world.rank()));
  const Tensor tokens = randint(0, 50257, {batch, size.length}, {i64, place.gpu}),
               targets = randint(0, 50257, {batch * size.length}, {i64, place.gpu});
  time_step(place, std::string(size.name) + " step, batch " + std::to_string(batch),
            place.world.size() * batch * size.length, 4, [&] { return step(tokens, targets); });
}

/// Steps with shards on the GPU, on the host, and on the host stepped within the backward.
void offload(const Place& place, std::int64_t batch) {
  const Size& size = sizes[0];
  for (const auto& [kept, within] : {std::pair(Kept::in_shards, false),
                                     {Kept::in_shards_of_the_host, false},
                                     {Kept::in_shards_of_the_host, true}}) {
    manual_seed(1);
    GptStep step(place, size, LossPrecision::of_logits, kept);
    const Tensor tokens = randint(0, 50257, {batch, size.length}, {i64, place.gpu}),
                 targets = randint(0, 50257, {batch * size.length}, {i64, place.gpu});
    const Time t = time_of(place, [&, within = within] { step.unclipped(tokens, targets, within); }, 4);
    if (place.speaks())
      std::printf("%s step without clipping, batch %lld, %d ranks, shards on the %s%s: %.1f ms\n", size.name,
                  static_cast<long long>(batch), place.world.size(), kept == Kept::in_shards ? "GPU" : "host",
                  within ? ", stepped within the backward" : "", t.us / 1e3);
    std::fflush(stdout);
  }
}

/// What the host takes for a step of a model with 16 tokens, whole or in shards.
void host(const Place& place, const Size& size, Kept kept) {
  manual_seed(1);
  GptStep step(place, size, LossPrecision::of_logits, kept);
  const Tensor tokens = randint(0, 50257, {1, size.length}, {i64, place.gpu}),
               targets = randint(0, 50257, {size.length}, {i64, place.gpu});
  const Time t = time_of(place, [&] { step(tokens, targets); }, 4);
  if (place.speaks())
    std::printf("%s, 16 tokens, %d ranks, %s: %.3f ms (host %.3f)\n", size.name, place.world.size(),
                kept == Kept::whole ? "whole" : "in shards", t.us / 1e3, t.host_us / 1e3);
  std::fflush(stdout);
}

/// The narrow model moves nothing that takes time: there the difference is what the engine takes of the host.
void host(const Place& place) {
  for (const Size& size : {Size{"d48", 48, 1600, 25, 16}, Size{"48 blocks of width 64", 48, 64, 1, 16}})
    for (const Kept kept : {Kept::whole, Kept::in_shards}) host(place, size, kept);
}

/// `rows` rows of `length` + 1 words that follow one another by a fixed table four times in five, so that
/// there is something to learn; the same on every rank.
std::vector<std::int64_t> words(std::int64_t rows, std::int64_t length) {
  const std::vector<std::int64_t> after = randperm(50257, {i64, Device::cpu()}).to_vector<std::int64_t>(),
                                  other = randint(0, 50257, {rows * (length + 1)}, {i64, Device::cpu()})
                                              .to_vector<std::int64_t>();
  const std::vector<float> chance = rand({rows * (length + 1)}, {f32, Device::cpu()}).to_vector<float>();
  std::vector<std::int64_t> all(other);
  for (std::size_t i = 1; i < all.size(); ++i)
    if (i % static_cast<std::size_t>(length + 1) != 0 && chance[i] < 0.8F)
      all[i] = after[static_cast<std::size_t>(all[i - 1])];
  return all;
}

void parity(const Place& place) {
  constexpr std::int64_t batches = 10, batch = 8, length = sizes[0].length;
  manual_seed(1);
  GptStep step(place, sizes[0], LossPrecision::wide);
  const Tensor all =
      to(Tensor::from(words(batches * batch, length), {batches, batch, length + 1}), place.gpu);
  const std::int64_t share = batch / place.world.size();
  for (std::int64_t i = 0; i < 100; ++i) {
    const Tensor own =
        slice(select(all, 0, i % batches), 0, place.world.rank() * share, (place.world.rank() + 1) * share);
    const Tensor loss = step(contiguous(slice(own, 1, 0, length)),
                             reshape(contiguous(slice(own, 1, 1, length + 1)), {share * length}));
    place.group().all_reduce(loss, ReduceOp::average());
    if (place.speaks()) std::printf("step %lld: %.6f\n", static_cast<long long>(i), loss.item());
  }
  std::fflush(stdout);
}

void small(const Place& place) {
  const shard::Options options{.mesh = place.world.mesh()};
  {
    manual_seed(42);
    nn::Sequential model(bench::Mlp{}, bench::Mlp{}, bench::Mlp{});
    model.to(place.gpu);
    for (std::size_t i = 0; i < 3; ++i) shard::fully_shard(model[i], options);
    shard::fully_shard(model, options);
    nn::AdamW optimizer(model.parameters(), {.lr = 1e-2});
    const Tensor x = randn({4, 16}, {f32, place.gpu});
    time_step(place, "three MLP(16), AdamW", 0, 200, [&] {
      const Tensor loss = sum(model(x));
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      return loss.detach();
    });
  }
  manual_seed(1);
  nn::Transformer model(
      {.width = 32, .heads = 8, .encoder_layers = 2, .decoder_layers = 2, .feedforward = 128});
  model.to(place.gpu);
  for (auto& layer : model.encoder.layers) shard::fully_shard(layer, options);
  for (auto& layer : model.decoder.layers) shard::fully_shard(layer, options);
  shard::fully_shard(model, options);
  nn::AdamW optimizer(model.parameters(), {.lr = 1e-2});
  const Tensor source = rand({20, 8, 32}, {f32, place.gpu}), target = rand({10, 8, 32}, {f32, place.gpu});
  time_step(place, "Transformer(32), AdamW", 0, 50, [&] {
    const Tensor loss = sum(model(source, target));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    return loss.detach();
  });
}

void run(const Place& place, std::span<char* const> words) {
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string_view word = words[i];
    if (word == "calls") calls(place);
    if (word == "small") small(place);
    if (word == "host") host(place);
    if (word == "parity") parity(place);
    if (word == "offload") offload(place, std::atoll(words[++i]));
    for (const Size& size : sizes)
      if (word == size.name) gpt(place, size, std::atoll(words[++i]));
  }
}

}  // namespace

int main(int count, char** arguments) {
  std::span<char* const> words(arguments + 1, static_cast<std::size_t>(count - 1));
  int ranks = launched_ranks() > 1 ? 0 : gpu_count();
  if (words.size() > 1 && std::strcmp(words[0], "--ranks") == 0) {
    ranks = std::atoi(words[1]);
    words = words.subspan(2);
  }
  run_ranks(ranks, [&](World& world) { run(Place{world}, words); });
}
