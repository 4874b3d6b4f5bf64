// The encoder-decoder Transformer: what it consists of, how it starts, what it sees, that it learns.
#include "nn/transformer.h"

#include <algorithm>
#include <cmath>

#include "autograd/autograd.h"
#include "nn/compile.h"
#include "nn/optimizer.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;

namespace {

using Names = std::vector<std::string>;

constexpr TransformerOptions small{.width = 16, .encoder_layers = 2, .decoder_layers = 2, .feedforward = 8};

Transformer make(TransformerOptions options = small) {
  manual_seed(2);
  return Transformer(options);
}

Names parameter_names(const Module& module, std::string_view prefix = "") {
  Names out;
  for (const auto& [name, parameter] : module.named_parameters())
    if (name.starts_with(prefix)) out.push_back(name.substr(prefix.size()));
  return out;
}

Names child_names(Module& module) {
  Names out;
  for (const NamedModule& m : module.named_modules())
    if (!m.name.empty() && m.name.find('.') == std::string::npos) out.push_back(m.name);
  return out;
}

Names attention_names(const std::string& name) {
  return {name + ".in_proj_weight", name + ".in_proj_bias", name + ".out_proj.weight",
          name + ".out_proj.bias"};
}

Names joined(std::initializer_list<Names> lists) {
  Names out;
  for (const Names& list : lists) out.insert(out.end(), list.begin(), list.end());
  return out;
}

const Tensor src = numbers({6, 2, 16}, f32, 1), tgt = numbers({4, 2, 16}, f32, 2);

}  // namespace

TEST_CASE("transformer: parameters and children have PyTorch's names, in its order") {
  Transformer model = make();
  const Names linears{"linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"},
      norms{"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"};
  const Names encoder = joined({attention_names("self_attn"), linears, norms});
  const Names decoder = joined({attention_names("self_attn"),
                                attention_names("multihead_attn"),
                                linears,
                                norms,
                                {"norm3.weight", "norm3.bias"}});
  CHECK(encoder.size() == 12);
  CHECK(decoder.size() == 18);
  Names all;
  for (const auto& [stack, layer] : {std::pair{"encoder", encoder}, std::pair{"decoder", decoder}}) {
    for (const char* i : {"0", "1"})
      for (const std::string& name : layer) all.push_back(fmt::format("{}.layers.{}.{}", stack, i, name));
    for (const char* name : {"weight", "bias"}) all.push_back(fmt::format("{}.norm.{}", stack, name));
  }
  CHECK(parameter_names(model) == all);
  CHECK(child_names(model.encoder.layers[0]) ==
        Names{"self_attn", "linear1", "dropout", "linear2", "norm1", "norm2", "dropout1", "dropout2"});
  CHECK(child_names(model.decoder.layers[0]) == Names{"self_attn", "multihead_attn", "linear1", "dropout",
                                                      "linear2", "norm1", "norm2", "norm3", "dropout1",
                                                      "dropout2", "dropout3"});
}

TEST_CASE("transformer: sizes follow from width d and feed-forward f") {
  for (const auto& [d, f] : {std::pair{16, 8}, std::pair{32, 128}, std::pair{8, 1}}) {
    Transformer model =
        make({.width = d, .heads = 8, .encoder_layers = 2, .decoder_layers = 2, .feedforward = f});
    const std::int64_t attention = 4 * d * d + 4 * d, linears = 2 * d * f + d + f, norm = 2 * d;
    const std::int64_t encoder = attention + linears + 2 * norm, decoder = 2 * attention + linears + 3 * norm;
    CHECK(model.encoder.layers[1].parameter_count() == encoder);
    CHECK(model.decoder.layers[1].parameter_count() == decoder);
    CHECK(model.parameter_count() == 2 * (encoder + decoder + norm));
    for (std::size_t i : {0, 1}) {
      tie(model.encoder.layers[i].linear1.weight, model.decoder.layers[i].linear1.weight);
      tie(model.encoder.layers[i].linear2.weight, model.decoder.layers[i].linear2.weight);
    }
    CHECK(model.parameter_count() == 2 * (encoder + decoder + norm) - 4 * d * f);
  }
}

TEST_CASE("transformer: layers of a stack start alike, and a whole model fills its matrices anew") {
  manual_seed(1);
  TransformerEncoder stack(small);
  CHECK(same_bits(stack.layers[0].linear1.weight.data(), stack.layers[1].linear1.weight.data()));
  CHECK_FALSE(stack.layers[0].linear1.weight.object() == stack.layers[1].linear1.weight.object());
  Transformer model = make();
  for (const auto& [name, parameter] : model.named_parameters()) {
    INFO(name);
    const Shape& shape = parameter.shape();
    const std::vector<double> values = doubles(parameter.data());
    if (name.ends_with("in_proj_bias") || name.ends_with("out_proj.bias"))
      CHECK(std::all_of(values.begin(), values.end(), [](double v) { return v == 0; }));
    if (shape.rank() == 1) continue;
    const double bound = std::sqrt(6.0 / static_cast<double>(shape[0] + shape[1]));
    const double largest = std::abs(*std::max_element(
        values.begin(), values.end(), [](double a, double b) { return std::abs(a) < std::abs(b); }));
    CHECK(largest <= bound);
    CHECK(largest > 0.9 * bound);
  }
  CHECK_FALSE(same_bits(model.encoder.layers[0].linear1.weight.data(),
                        model.encoder.layers[1].linear1.weight.data()));
}

TEST_CASE("transformer: gradients are those of finite differences") {
  for (Causal causal : {Causal::no, Causal::yes}) {
    Transformer model = make(
        {.width = 4, .heads = 2, .encoder_layers = 1, .decoder_layers = 1, .feedforward = 3, .dropout = 0});
    model.to(f64);
    const std::vector<Tensor> in = {numbers({3, 2, 4}, f64, 1), numbers({2, 2, 4}, f64, 2)};
    CHECK(gradient_error([&](std::span<const Tensor> x) { return model(x[0], x[1], causal); }, in) < 1e-6);
  }
}

TEST_CASE("transformer: dropout acts in training alone and follows the seed") {
  Transformer model = make();
  const auto run = [&](unsigned seed) {
    manual_seed(seed);
    return model(src, tgt).detach();
  };
  CHECK(run(1).shape() == tgt.shape());
  CHECK(same_bits(run(1), run(1)));
  CHECK_FALSE(same_bits(run(1), run(2)));
  model.eval();
  CHECK(same_bits(run(1), run(2)));
  TransformerOptions options = small;
  options.dropout = 0;
  CHECK(same_bits(make(options)(src, tgt).detach(), run(1)));
}

TEST_CASE("transformer: every dropout is passed, and dropping all that is added leaves the norms") {
  Transformer model = make();
  std::vector<double*> rates;
  std::vector<std::string> names;
  for (const NamedModule& m : model.named_modules()) {
    if (auto* dropout = dynamic_cast<Dropout*>(m.module))
      rates.push_back(&dropout->p);
    else if (auto* attention = dynamic_cast<MultiheadAttention*>(m.module))
      rates.push_back(&attention->dropout);
    else
      continue;
    names.push_back(m.name);
  }
  CHECK(rates.size() == 2 * 4 + 2 * 6);
  for (double* rate : rates) *rate = 0;
  const Tensor plain = model(src, tgt).detach();
  for (std::size_t i = 0; i < rates.size(); ++i) {
    INFO(names[i]);
    *rates[i] = 0.5;
    CHECK_FALSE(same_bits(model(src, tgt).detach(), plain));
    *rates[i] = 0;
  }
  // With all that is added to the input dropped, a layer is its norms.
  TransformerEncoderLayer& layer = model.encoder.layers[0];
  layer.dropout1.p = layer.dropout2.p = 1;
  CHECK(same_bits(layer(src).detach(), layer.norm2(layer.norm1(src)).detach()));
  TransformerDecoderLayer& other = model.decoder.layers[0];
  other.dropout1.p = other.dropout2.p = other.dropout3.p = 1;
  CHECK(same_bits(other(tgt, src).detach(), other.norm3(other.norm2(other.norm1(tgt))).detach()));
}

TEST_CASE("transformer: a causal target sees its past and the whole source") {
  Transformer model = make();
  model.eval();
  const Tensor before = model(src, tgt, Causal::yes).detach();
  Tensor later = clone(tgt), other = clone(src);
  fill_(narrow(later, 0, 2, 2), 1);
  fill_(narrow(other, 0, 5, 1), 1);
  const Tensor after = model(src, later, Causal::yes).detach();
  CHECK(same_bits(narrow(before, 0, 0, 2), narrow(after, 0, 0, 2)));
  CHECK_FALSE(same_bits(narrow(before, 0, 2, 2), narrow(after, 0, 2, 2)));
  CHECK_FALSE(same_bits(narrow(before, 0, 0, 1), narrow(model(other, tgt, Causal::yes).detach(), 0, 0, 1)));
  CHECK_FALSE(same_bits(before, model(src, tgt).detach()));
}

TEST_CASE("transformer: a clone and a loaded state answer alike; every parameter learns") {
  Transformer model = make();
  model.eval();
  Transformer copy = model.clone(), loaded{small};
  loaded.eval();
  loaded.load_state_dict(model.state_dict());
  const Tensor y = model(src, tgt).detach();
  CHECK(same_bits(copy(src, tgt).detach(), y));
  CHECK(same_bits(loaded(src, tgt).detach(), y));
  Sgd optimizer(model.parameters(), {.lr = 0.01});
  const Tensor aim = numbers(tgt.shape(), f32, 5, -1, 1);
  const auto loss = [&] { return sum(square(sub(model(src, tgt), aim))); };
  const double first = loss().item();
  for (int step = 0; step < 20; ++step) {
    model.zero_grad();
    loss().backward();
    for (const auto& [name, parameter] : model.named_parameters()) {
      INFO(name);
      CHECK(parameter.grad().defined());
    }
    optimizer.step();
  }
  CHECK(loss().item() < 0.8 * first);
  CHECK(same_bits(copy(src, tgt).detach(), y));
}

TEST_CASE(
    "transformer: with norms first a layer that adds nothing gives its input, and gradients are right") {
  for (const Activation activation : {Activation::relu, Activation::gelu})
    for (const bool batch_first : {false, true}) {
      TransformerOptions options{.width = 4,
                                 .heads = 2,
                                 .encoder_layers = 1,
                                 .decoder_layers = 1,
                                 .feedforward = 3,
                                 .dropout = 0,
                                 .batch_first = batch_first,
                                 .norm_first = true,
                                 .activation = activation};
      Transformer model = make(options);
      model.to(f64);
      const std::vector<Tensor> in = {numbers({3, 2, 4}, f64, 1),
                                      numbers(batch_first ? Shape{3, 4, 4} : Shape{4, 2, 4}, f64, 2)};
      const Tensor padding = Tensor::from<bool>({0, 0, 0, 1, 0, 0}, batch_first ? Shape{3, 2} : Shape{2, 3});
      const auto call = [&](std::span<const Tensor> x) {
        return model(x[0], x[1],
                     {.src = {.key_padding_mask = padding},
                      .tgt = {Causal::yes},
                      .memory = {.key_padding_mask = padding}});
      };
      CHECK(gradient_error(call, in) < 1e-6);
    }
  Transformer model =
      make({.width = 16, .encoder_layers = 1, .decoder_layers = 1, .feedforward = 8, .norm_first = true});
  TransformerEncoderLayer& layer = model.encoder.layers[0];
  layer.dropout1.p = layer.dropout2.p = 1;
  CHECK(same_bits(layer(src).detach(), src));
  TransformerDecoderLayer& other = model.decoder.layers[0];
  other.dropout1.p = other.dropout2.p = other.dropout3.p = 1;
  CHECK(same_bits(other(tgt, src).detach(), tgt));
}

TEST_CASE("transformer: what is padded changes nothing, in each stack and each layer") {
  for (const bool norm_first : {false, true}) {
    TransformerOptions options = small;
    options.norm_first = norm_first;
    options.dropout = 0;
    Transformer model = make(options);
    // The last two of six source positions are padding.
    const Tensor padding = expand(greater_equal(arange(0, 6), 4), {2, 6});
    Tensor other = clone(src);
    fill_(narrow(other, 0, 4, 2), 3);
    const AttentionMasks hides{.key_padding_mask = padding};
    const TransformerMasks masks{.src = hides, .memory = hides};
    CHECK(same_bits(model(src, tgt, masks).detach(), model(other, tgt, masks).detach()));
    CHECK_FALSE(same_bits(model(src, tgt, masks).detach(), model(src, tgt).detach()));
    CHECK(distance(model(src, tgt, masks), model(narrow(src, 0, 0, 4), tgt)) < 1e-5);
    const Tensor seen = narrow(model.encoder(src, hides), 0, 0, 4).detach();
    CHECK(distance(seen, model.encoder(narrow(src, 0, 0, 4))) < 1e-5);
    CHECK(distance(model.decoder(tgt, src, {.memory = hides}), model.decoder(tgt, narrow(src, 0, 0, 4))) <
          1e-5);
    // A mask of pairs is the causal one.
    const AttentionMasks later{.attn_mask = triu(ones({6, 6}, {boolean}), 1)};
    CHECK(distance(model.encoder.layers[0](src, later), model.encoder.layers[0](src, Causal::yes)) < 1e-5);
  }
}

TEST_CASE("transformer: a compiled model follows its masks") {
  for (const bool norm_first : {false, true}) {
    TransformerOptions options = small;
    options.norm_first = norm_first;
    options.dropout = 0;
    options.activation = Activation::gelu;
    Transformer plain = make(options), compiled = plain.clone();
    nn::compile(compiled);
    const Tensor padding = expand(greater_equal(arange(0, 6), 4), {2, 6});
    const AttentionMasks none, hides{.key_padding_mask = padding}, causal{Causal::yes};
    for (const auto& masks :
         {TransformerMasks{}, TransformerMasks{hides, none, hides}, TransformerMasks{none, causal, none},
          TransformerMasks{none, none, hides}, TransformerMasks{hides, none, none}})
      for (int again = 0; again < 2; ++again)
        CHECK(same_bits(compiled(src, tgt, masks).detach(), plain(src, tgt, masks).detach()));
  }
}

TEST_CASE("transformer: what does not fit is refused in one line") {
  CHECK(one_line_about(message_of<ValueError>([] { Transformer({.width = 10}); }), "MultiheadAttention"));
  CHECK(one_line_about(message_of<ValueError>([] { Transformer({.encoder_layers = -1}); }), "Transformer"));
  CHECK(one_line_about(message_of<ValueError>([] { Transformer({.feedforward = 0}); }), "Linear"));
  Transformer model = make();
  CHECK(one_line_about(message_of<ShapeError>([&] { model(numbers({6, 2, 8}, f32), tgt); }),
                       "MultiheadAttention"));
  CHECK(one_line_about(message_of<ShapeError>([&] { model(numbers({6, 3, 16}, f32), tgt); }), "attention"));
  const AttentionMasks wide{.key_padding_mask = zeros({2, 7}, {boolean})};
  for (const TransformerMasks& masks : {TransformerMasks{.src = wide}, {.tgt = wide}, {.memory = wide}})
    CHECK(one_line_about(message_of<ShapeError>([&] { model(src, tgt, masks); }),
                         "MultiheadAttention: key_padding_mask"));
}
