// Layers that take several tensors, with PyTorch's state dicts, against PyTorch's values and gradients.
#include "nn/transformer.h"

#include <algorithm>
#include <set>

#include "tests/catch.h"
#include "tests/golden/golden.h"

namespace sherd::test {
namespace {

using nlohmann::json;

/// Arguments of forward, and what they may say beside the tensors.
struct Call {
  std::vector<Tensor> x;
  nn::Causal causal;
  nn::AttentionMasks masks{};
};

template <class M>
void check_module(const GoldenCase& golden, M module, Tensor (*forward)(const M&, const Call&)) {
  const auto roles = golden.args.at("roles").get<std::vector<std::size_t>>();
  const std::size_t count = *std::max_element(roles.begin(), roles.end()) + 1;
  module.eval();
  module.to(golden.find("out0").dtype());
  nn::StateDict state;
  for (const json& name : golden.args.at("params"))
    state.emplace_back(name, golden.find("in" + std::to_string(count + state.size())));
  module.load_state_dict(state);

  std::vector<Tensor> inputs;
  for (std::size_t i = 0; i < count; ++i)
    inputs.push_back(golden.find("in" + std::to_string(i)).requires_grad_());
  Call call{{}, golden.args.at("options").value("causal", false) ? nn::Causal::yes : nn::Causal::no};
  call.masks = {call.causal, golden.find("attn_mask"), golden.find("key_padding_mask")};
  for (const std::size_t role : roles) call.x.push_back(inputs[role]);
  const Tensor y = forward(module, call);
  CHECK(difference(y.detach(), golden.find("out0"), golden.tolerance) == "");
  y.backward(golden.find("gy0"));
  for (std::size_t i = 0; i < count; ++i) {
    INFO("input " << i);
    CHECK(difference(inputs[i].grad(), golden.find("gin" + std::to_string(i)), golden.tolerance) == "");
  }
  const auto params = module.named_parameters();
  REQUIRE(params.size() == state.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    INFO(params[i].name);
    CHECK(params[i].name == state[i].first);
    const Tensor expected = golden.find("gin" + std::to_string(count + i));
    CHECK(difference(params[i].parameter.grad(), expected, golden.tolerance) == "");
  }
}

void check_attention(const GoldenCase& golden) {
  const json& o = golden.args.at("options");
  check_module<nn::MultiheadAttention>(
      golden,
      {o.at("width").get<int>(),
       o.at("heads").get<int>(),
       {.dropout = 0.1, .batch_first = o.at("batch_first").get<bool>()}},
      [](const auto& attention, const Call& c) { return attention(c.x[0], c.x[1], c.x[2], c.masks); });
}

nn::TransformerOptions transformer_options(const GoldenCase& golden) {
  const json& o = golden.args.at("options");
  const std::int64_t layers = o.value("layers", 1);
  return {.width = o.at("width"),
          .heads = o.at("heads"),
          .encoder_layers = layers,
          .decoder_layers = layers,
          .feedforward = o.at("feedforward"),
          .batch_first = o.at("batch_first")};
}

void check_encoder_layer(const GoldenCase& golden) {
  check_module<nn::TransformerEncoderLayer>(
      golden, nn::TransformerEncoderLayer(transformer_options(golden)),
      [](const auto& layer, const Call& c) { return layer(c.x[0], c.causal); });
}
void check_decoder_layer(const GoldenCase& golden) {
  check_module<nn::TransformerDecoderLayer>(
      golden, nn::TransformerDecoderLayer(transformer_options(golden)),
      [](const auto& layer, const Call& c) { return layer(c.x[0], c.x[1], c.causal); });
}
void check_transformer(const GoldenCase& golden) {
  check_module<nn::Transformer>(
      golden, nn::Transformer(transformer_options(golden)),
      [](const auto& model, const Call& c) { return model(c.x[0], c.x[1], c.causal); });
}

const std::map<std::string, void (*)(const GoldenCase&)> checks{
    {"nn.MultiheadAttention", check_attention},
    {"nn.TransformerEncoderLayer", check_encoder_layer},
    {"nn.TransformerDecoderLayer", check_decoder_layer},
    {"nn.Transformer", check_transformer}};

}  // namespace

TEST_CASE("layers of several tensors with PyTorch's parameters agree with PyTorch") {
  std::set<std::string> layers;
  for (const GoldenCase& golden : load_goldens("layers")) {
    if (!golden.args.contains("roles")) continue;
    INFO(golden.name);
    REQUIRE(checks.contains(golden.op));
    checks.at(golden.op)(golden);
    layers.insert(golden.op);
  }
  CHECK(layers.size() == checks.size());
}

}  // namespace sherd::test
