// What training holds memory for, and what is left when there is too little of it.
#include "runtime/memory.h"

#include <algorithm>

#include "autograd/autograd.h"
#include "autograd/recompute.h"
#include "nn/gpt.h"
#include "nn/optimizer.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

HeldMemory held() { return Context::current().memory().held(DeviceType::cpu); }
CpuPool& pool() { return Context::current().cpu_pool(); }

Gpt seeded() {
  manual_seed(1);
  return Gpt({.layers = 2, .heads = 2, .width = 32, .context = 32, .vocab = 64});
}

Tensor loss_of(const Gpt& model, std::int64_t batch) {
  const Tensor tokens = to(numbers({batch, 32}, i32, 3, 0, 63), i64);
  return cross_entropy(flatten(model(tokens), 0, 1), flatten(tokens));
}

/// Bytes of the parameters, each of which has a block of its own: at most an eighth more.
bool holds(std::int64_t bytes, std::int64_t numel) {
  return bytes >= 4 * numel && static_cast<double>(bytes) <= 1.125 * 4 * static_cast<double>(numel) + 64 * 64;
}

std::vector<std::vector<double>> values_of(const Module& model) {
  std::vector<std::vector<double>> all;
  for (const Parameter& p : model.parameters()) all.push_back(doubles(p.data()));
  return all;
}

}  // namespace

TEST_CASE("memory: a training step's tensors count for what they are for") {
  const HeldMemory before = held();
  const auto now = [&](MemoryUse use) { return held()[use] - before[use]; };
  {
    Gpt model = seeded();
    const std::int64_t numel = model.parameter_count();
    AdamW optimizer(model.parameters());
    CHECK(holds(now(MemoryUse::parameters), numel));
    CHECK(now(MemoryUse::activations) == 0);
    Tensor loss = loss_of(model, 4);
    const std::int64_t activations = now(MemoryUse::activations);
    CHECK(activations > 0);
    loss.backward();
    CHECK(holds(now(MemoryUse::gradients), numel));
    CHECK(now(MemoryUse::activations) < activations / 2);
    CHECK(now(MemoryUse::optimizer) <= 7 * 64);  // its options
    optimizer.step();
    CHECK(holds(now(MemoryUse::optimizer), 2 * numel));
    optimizer.zero_grad();
    loss = {};
    CHECK(now(MemoryUse::gradients) == 0);
    CHECK(now(MemoryUse::activations) <= 4096);
    CHECK(now(MemoryUse::gathered) == 0);
    model.to(Device::cpu(1));
    CHECK(holds(now(MemoryUse::parameters), numel));
  }
  CHECK(held().bytes == before.bytes);
}

TEST_CASE("memory: what recomputation brings back in a backward are activations") {
  Gpt model = seeded();
  const Tensor x = numbers({4, 32, 32}, f32).requires_grad_();
  const Tensor y = recompute([&] { return model.blocks[0](x); });
  std::int64_t activations = 0;
  const std::int64_t before = held()[MemoryUse::activations];
  register_hook(x, [&](const Tensor& gradient) {
    activations = held()[MemoryUse::activations];
    return gradient;
  }).keep();
  sum(y).backward();
  CHECK(activations > before);
}

TEST_CASE(
    "memory: a step that found too little leaves all as it was, wherever it stopped, and a smaller one "
    "runs") {
  constexpr std::int64_t small = 2, large = 16;
  const auto train = [](Gpt& model, AdamW& optimizer, std::int64_t batch) {
    loss_of(model, batch).backward();
    clip_grad_norm_(model.parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
  };
  Gpt reference = seeded();
  AdamW by(reference.parameters());
  train(reference, by, small);
  const auto after_one = values_of(reference);
  train(reference, by, small);
  const auto expected = values_of(reference);

  // What the large step takes decides where it stops for less.
  std::int64_t most = 0;
  {
    Gpt model = seeded();
    AdamW optimizer(model.parameters());
    const std::int64_t base = held().total();
    Context::current().memory().reset_peak(DeviceType::cpu);
    train(model, optimizer, large);
    most = Context::current().memory().peak(DeviceType::cpu) - base;
  }
  for (const bool first_step : {true, false}) {
    int stopped = 0;
    for (int part = 0; part <= 20; ++part) {
      INFO("limit " << part << "/20 of what the step takes, first step: " << first_step);
      Gpt model = seeded();
      AdamW optimizer(model.parameters());
      if (!first_step) train(model, optimizer, small);
      const auto before = values_of(model);
      pool().trim();
      pool().set_limit(pool().system_bytes() + static_cast<std::size_t>(most * part / 20));
      std::string message;
      try {
        train(model, optimizer, large);
      } catch (const OutOfMemoryError& error) {
        message = error.what();
      }
      pool().set_limit(CpuPool::no_limit);
      if (message.empty()) continue;
      ++stopped;
      CHECK_THAT(message, ContainsSubstring("of its limit of") && ContainsSubstring("parameters "));
      CHECK(values_of(model) == before);
      optimizer.zero_grad();
      if (first_step) train(model, optimizer, small);
      CHECK(values_of(model) == after_one);
      train(model, optimizer, small);
      CHECK(values_of(model) == expected);
    }
    CHECK(stopped >= 10);
  }
}
