// Layers follow default options; training does not look at them.
#include "autograd/capture/capture.h"
#include "autograd/recompute.h"
#include "nn/gpt.h"
#include "nn/grad_scaler.h"
#include "nn/layers.h"
#include "nn/recurrent.h"
#include "nn/transformer.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// What a training step and its state come to.
std::vector<Tensor> trained() {
  manual_seed(1);
  const TensorOptions here{f32, Device::cpu()};
  nn::Gpt model(
      {.layers = 1, .heads = 2, .width = 8, .context = 4, .vocab = 16, .dropout = 0.1, .tensor = here});
  nn::AdamW optimizer(model.parameters(), {.lr = 0.1});
  nn::GradScaler scaler;
  const Tensor tokens = randint(0, 16, {2, 4}, {i64, Device::cpu()});
  std::vector<Tensor> values;
  for (int step = 0; step < 2; ++step) {
    const Tensor loss =
        recompute([&] { return cross_entropy(flatten(model(tokens), 0, 1), flatten(tokens)); });
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);
    values.push_back(nn::clip_grad_norm_(model.parameters(), 1.0));
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
    values.push_back(loss.detach());
  }
  nn::AdamW again(model.parameters(), {.lr = 0.2});
  again.load_state_dict(optimizer.state_dict());
  for (const auto& [name, tensor] : again.state_dict()) values.push_back(tensor);
  for (const auto& [name, tensor] : scaler.state_dict()) values.push_back(tensor);
  model.eval();
  Program forward = capture([&](std::span<const Tensor> in) { return std::vector{model(in[0])}; }, {tokens});
  values.push_back(forward.replay({tokens})[0]);
  for (const auto& [name, tensor] : model.clone().state_dict()) values.push_back(tensor);
  return values;
}

}  // namespace

TEST_CASE("default options: parameters and buffers of layers follow them", "[one thread]") {
  const DefaultOptions scope({.dtype = bf16, .device = Device::meta()});
  nn::Sequential model(nn::Linear(2, 2), nn::Conv2d(1, 1, 3), nn::BatchNorm2d(2), nn::LayerNorm(2),
                       nn::Embedding(3, 2), nn::MultiheadAttention(4, 2));
  nn::Lstm lstm(2, 2);
  nn::Gpt gpt({.layers = 1, .heads = 2, .width = 8, .context = 4, .vocab = 16});
  int seen = 0;
  for (const nn::Module* m : std::initializer_list<const nn::Module*>{&model, &lstm, &gpt}) {
    for (const nn::NamedParameter& p : m->named_parameters()) {
      INFO(p.name);
      CHECK(p.parameter.data().dtype() == bf16);
      CHECK(p.parameter.data().device() == Device::meta());
      ++seen;
    }
    for (const nn::NamedBuffer& b : m->named_buffers()) {
      INFO(b.name);
      CHECK(b.tensor.dtype() == (b.name.ends_with("tracked") ? i64 : bf16));
      CHECK(b.tensor.device() == Device::meta());
    }
  }
  CHECK(seen > 20);
  CHECK(nn::BatchNorm2d(2, {.tensor = {f32, Device::cpu()}}).weight.data().spec() ==
        Spec{{2}, f32, Device::cpu()});
}

TEST_CASE("default options: a training step and its state are the same in any") {
  const std::vector<Tensor> expected = trained();
  for (TensorOptions options : {TensorOptions{f64, Device::cpu()}, TensorOptions{bf16, Device::meta()}}) {
    const DefaultOptions scope(options);
    const std::vector<Tensor> got = trained();
    REQUIRE(got.size() == expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      CHECK(got[i].spec() == expected[i].spec());
      CHECK(same_bits(got[i], expected[i]));
    }
  }
}
