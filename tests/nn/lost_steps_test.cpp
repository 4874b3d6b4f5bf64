// Steps that 16 bits cannot hold.
#include <algorithm>

#include "nn/llama.h"
#include "nn/optimizer.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "tests/catch.h"
#include "tests/logged.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;

namespace {

std::unique_ptr<Optimizer> made(const std::string& name, const Module& model, double lr, Masters masters) {
  if (name == "AdamW")
    return std::make_unique<AdamW>(model.parameters(), AdamWOptions{.lr = lr, .masters = masters});
  if (name == "Adam")
    return std::make_unique<Adam>(model.parameters(), AdamOptions{.lr = lr, .masters = masters});
  if (name == "Sgd") return std::make_unique<Sgd>(model.parameters(), SgdOptions{.lr = lr});
  if (name == "momentum")
    return std::make_unique<Sgd>(model.parameters(), SgdOptions{.lr = lr, .momentum = 0.9});
  return std::make_unique<Rmsprop>(model.parameters(), RmspropOptions{.lr = lr});
}

/// The share of weights that are others after 40 steps.
double moved(Masters masters) {
  manual_seed(1);
  Llama model({.vocab_size = 16,
               .hidden_size = 16,
               .intermediate_size = 24,
               .num_hidden_layers = 2,
               .num_attention_heads = 2,
               .tensor = {bf16, Device::cpu()}});
  const auto optimizer = made("AdamW", model, 2e-5, masters);
  const Llama before = model.clone();
  const Tensor tokens = randint(0, 16, {4, 8});
  for (int step = 0; step < 40; ++step) {
    optimizer->zero_grad();
    mean(square(model(tokens))).backward();
    optimizer->step();
  }
  double changed = 0, all = 0;
  for (const auto& [name, t] : model.state_dict()) {
    changed += sum(to(not_equal(t, before.state_dict().at(name)), f64)).item();
    all += static_cast<double>(t.numel());
  }
  return changed / all;
}

}  // namespace

TEST_CASE("optimizers: fine-tuning in bf16 loses most steps without masters") {
  const double without = moved(Masters::none), with = moved(Masters::in_f32);
  INFO(without << " and " << with);
  CHECK(without < 0.75 * with);
}

TEST_CASE("optimizers: one line in the log says that 16 bits are stepped without masters, and what to do") {
  for (const std::string name : {"AdamW", "Adam", "Sgd", "momentum", "Rmsprop"})
    for (const DType dtype : {bf16, f16, f32, f64})
      for (const Masters masters : {Masters::none, Masters::in_f32}) {
        if (masters == Masters::in_f32 && (name.front() != 'A' || dtype == f64)) continue;
        INFO(name << " " << dtype);
        const Logged log;
        Linear model(3, 3, {.tensor = {dtype, Device::cpu()}});
        const auto optimizer = made(name, model, 1e-3, masters);
        for (int step = 0; step < 3; ++step) {
          sum(model(ones({2, 3}, {dtype}))).backward();
          optimizer->step();
        }
        const std::string text = log.text();
        const bool lost = masters == Masters::none && size_of(dtype) == 2;
        CHECK(std::ranges::count(text, '\n') == (lost ? 1 : 0));
        CHECK((text.find("Masters::in_f32") != std::string::npos) == lost);
      }
}

TEST_CASE("batch norm: in bf16 running statistics stop on their way, in f32 they arrive") {
  const std::int64_t channels = 64;
  const Tensor wanted = linspace(1, 2, channels), x = stack({wanted - 0.5, wanted + 0.5});
  for (const bool narrow : {true, false}) {
    BatchNorm1d layer(channels);
    if (narrow) layer.to(bf16);
    for (int step = 0; step < 200; ++step) layer(sherd::to(x, bf16));
    const Tensor rounded = sherd::to(mean(sherd::to(sherd::to(x, bf16), f32), {0}), f32);
    const double off = amax(abs(sherd::to(layer.running_mean, f32) / rounded - 1)).item();
    INFO(narrow << " " << off);
    CHECK((narrow ? off > 0.01 && off < 0.04 : off < 1e-5));
  }
}
