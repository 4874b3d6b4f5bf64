// Layers that take several tensors, with PyTorch's state dicts, against PyTorch's values and gradients.
#include "nn/transformer.h"

#include <algorithm>
#include <set>

#include "runtime/ops.h"
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

nn::Transformer masked_transformer(const GoldenCase& golden, bool batch_first) {
  const json& o = golden.args.at("options");
  nn::Transformer model({.width = o.at("width"),
                         .heads = o.at("heads"),
                         .encoder_layers = 1,
                         .decoder_layers = 1,
                         .feedforward = o.at("feedforward"),
                         .dropout = 0,
                         .batch_first = batch_first,
                         .norm_first = o.at("norm_first"),
                         .activation = o.at("activation") == "gelu" ? Activation::gelu : Activation::relu});
  nn::StateDict state;
  for (const json& name : golden.args.at("params"))
    state.emplace_back(name, golden.find("param" + std::to_string(state.size())));
  model.load_state_dict(state);
  return model;
}

/// The masks of a combination, by PyTorch's names.
nn::TransformerMasks masks_of(const GoldenCase& golden, const json& kinds) {
  nn::TransformerMasks masks;
  const auto find = [&](const std::string& name) {
    return kinds[name].is_null() ? Tensor() : golden.find(name);
  };
  for (const auto& [part, name] :
       {std::pair{&masks.src, "src"}, {&masks.tgt, "tgt"}, {&masks.memory, "memory"}}) {
    part->attn_mask = find(std::string(name) + "_mask");
    part->key_padding_mask = find(std::string(name) + "_key_padding_mask");
  }
  if (kinds["tgt_mask"] == "causal") masks.tgt = {nn::Causal::yes, {}, masks.tgt.key_padding_mask};
  return masks;
}

void check_masks(const GoldenCase& golden, bool batch_first) {
  nn::Transformer model = masked_transformer(golden, batch_first);
  const auto turned = [&](const Tensor& x) { return batch_first ? x : transpose(x, 0, 1); };
  for (std::size_t i = 0; i < golden.args.at("masks").size(); ++i) {
    const json& kinds = golden.args["masks"][i];
    INFO(kinds.dump());
    const auto expected = [&](const char* key) {
      return select(golden.find(key), 0, static_cast<std::int64_t>(i));
    };
    const Tensor src = clone(golden.find("src")).requires_grad_(),
                 tgt = clone(golden.find("tgt")).requires_grad_();
    model.zero_grad();
    const Tensor y = turned(model(turned(src), turned(tgt), masks_of(golden, kinds)));
    y.backward(golden.find("gy"));
    std::vector<Tensor> sums;
    for (const auto& p : model.named_parameters())
      sums.push_back(sum(mul(p.parameter.grad(), p.parameter.data())));
    CHECK(difference(y.detach(), expected("out"), 4, Scale::largest) == "");
    CHECK(difference(src.grad(), expected("gsrc"), 4, Scale::largest) == "");
    CHECK(difference(tgt.grad(), expected("gtgt"), 4, Scale::largest) == "");
    CHECK(difference(stack(sums), expected("sums"), 4, Scale::largest) == "");
  }
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

TEST_CASE(
    "the Transformer with every combination of masks agrees with PyTorch, norms first or last, GELU or "
    "ReLU") {
  std::size_t cases = 0;
  for (const GoldenCase& golden : load_goldens("masks"))
    for (const bool batch_first : {true, false}) {
      INFO(golden.name << " " << batch_first);
      check_masks(golden, batch_first);
      ++cases;
    }
  CHECK(cases == 2 * 4);
}

}  // namespace sherd::test
