// The model: its cache, its training, sharded and in 16 bits. Values and gradients are the goldens'.
#include "nn/llama.h"

#include <cmath>

#include "collectives/world.h"
#include "nn/optimizer.h"
#include "nn/recurrent.h"
#include "shard/fully_shard.h"
#include "tests/ranks.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;

namespace {

const LlamaOptions tiny{.vocab_size = 20,
                        .hidden_size = 16,
                        .intermediate_size = 24,
                        .num_hidden_layers = 2,
                        .num_attention_heads = 4,
                        .num_key_value_heads = 2,
                        .max_position_embeddings = 12};

Llama make(const LlamaOptions& options = tiny) {
  manual_seed(1);
  return Llama(options);
}

Tensor tokens(const Shape& shape, unsigned seed = 1) { return numbers(shape, i64, seed, 0, 19); }

Tensor loss_of(const Llama& model, const Tensor& x) {
  return cross_entropy(reshape(model(x), {-1, tiny.vocab_size}), reshape(roll(x, {-1}, {1}), {-1}));
}

}  // namespace

TEST_CASE("llama: logits from a cache are those of the whole sequence") {
  Llama model = make();
  const NoGrad guard;
  const Tensor x = tokens({3, 12}), whole = model(x);
  for (const std::vector<std::int64_t>& cut :
       {std::vector<std::int64_t>{12}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {5, 1, 6}, {1, 11}}) {
    KeyValueCache cache;
    std::int64_t at = 0;
    for (std::int64_t n : cut) {
      CHECK(distance(model(narrow(x, 1, at, n), cache), narrow(whole, 1, at, n)) < 1e-5);
      at += n;
    }
    CHECK(one_line_about(message_of<ShapeError>([&] { model(tokens({3, 1}), cache); }), "13 positions"));
  }
  Tensor other = clone(x);
  fill_(narrow(other, 1, 7, 5), 3);
  CHECK(same_bits(narrow(model(other), 1, 0, 7), narrow(whole, 1, 0, 7)));
}

TEST_CASE(
    "llama: it learns, with tied embeddings and biases too, and in 16 bits as in 32 to their rounding") {
  for (const bool more : {false, true}) {
    LlamaOptions options = tiny;
    options.tie_word_embeddings = options.mlp_bias = more;
    if (more) options.head_dim = 6, options.attention_bias = AttentionBias::all;
    Llama model = make(options);
    const Tensor x = tokens({2, 12});
    Llama narrow_model = model.clone();
    narrow_model.to(bf16);
    const Tensor wide = model(x).detach(), rounded = to(narrow_model(x).detach(), f32);
    CHECK(distance(rounded, wide) < 0.03 * amax(abs(wide)).item());
    AdamW optimizer(model.parameters(), {.lr = 1e-2});
    std::vector<double> losses;
    for (int step = 0; step < 60; ++step) {
      const Tensor loss = loss_of(model, x);
      losses.push_back(loss.item());
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    CHECK(losses.back() < 0.3 * losses.front());
  }
}

TEST_CASE("llama: gradients to second order, and those of a layer that goes both ways") {
  manual_seed(3);
  const GatedMlp mlp(3, 4, {Bias::no, {f64}});
  LlamaOptions options = tiny;
  options.tensor = {f64};
  const LlamaBlock block(options);
  const nn::Lstm lstm(2, 3, {.layers = 2, .tensor = {f64}, .bidirectional = true});
  const auto check = [](auto&& fn, const Shape& shape) {
    const std::vector<Tensor> in{numbers(shape, f64, 2)};
    CHECK(gradient_error([&](std::span<const Tensor> x) { return fn(x[0]); }, in) < 1e-5);
    CHECK(second_gradient_error([&](std::span<const Tensor> x) { return fn(x[0]); }, in) < 1e-5);
  };
  check([&](const Tensor& x) { return mlp(x); }, {2, 3});
  check([&](const Tensor& x) { return block(x); }, {1, 3, 16});
  options.norms = NormPlaces::before_and_behind, options.gain = Gain::one_plus_weight;
  options.query_key_norms = true, options.attn_logit_softcapping = 0.5, options.sliding_window = 2;
  options.projections = Projections::fused, options.partial_rotary_factor = 0.5;
  for (const Gate gate : {Gate::gelu, Gate::gelu_tanh}) {
    options.hidden_act = gate;
    const LlamaBlock other(options);
    check([&](const Tensor& x) { return other(x); }, {1, 3, 16});
  }
  check([&](const Tensor& x) { return lstm(x).y; }, {3, 2, 2});
}

TEST_CASE("llama: sharded by blocks it trains to the bits of one process") {
  const auto train = [](Llama& model) {
    AdamW optimizer(model.parameters(), {.lr = 1e-2});
    std::vector<double> losses;
    for (int step = 0; step < 3; ++step) {
      const Tensor loss = loss_of(model, tokens({2, 12}, 5 + static_cast<unsigned>(step)));
      losses.push_back(loss.item());
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    return losses;
  };
  Llama alone = make();
  const std::vector<double> expected = train(alone);
  for (const int ranks : {1, 2, 4})
    for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
      CHECK_NOTHROW(run_ranks(ranks, [&](World&) {
        Llama model = make();
        for (LlamaBlock& block : model.model.layers) shard::fully_shard(block, {.layout = layout});
        shard::fully_shard(model, {.layout = layout});
        expect(train(model) == expected, "losses differ");
      }));
}

TEST_CASE("llama: a window as wide as the sequence is none, and keys beyond a narrow one are not seen") {
  LlamaOptions options = tiny;
  options.num_hidden_layers = 1;
  const Llama plain = make(options);
  const Tensor x = tokens({2, 12});
  for (const bool capped : {false, true}) {
    if (capped) options.attn_logit_softcapping = 1e3;  // hardly a cap
    options.sliding_window = 12;
    const Tensor whole = make(options)(x);
    if (capped)
      CHECK(distance(whole.detach(), plain(x).detach()) < 1e-5);
    else
      CHECK(same_bits(whole.detach(), plain(x).detach()));
    options.sliding_window = 5;
    const Llama near = make(options);
    Tensor other = clone(x);
    fill_(narrow(other, 1, 0, 4), 3);  // in one layer the last 4 of 12 see none of these
    const Tensor a = near(x).detach(), b = near(other).detach();
    CHECK(same_bits(narrow(a, 1, 8, 4), narrow(b, 1, 8, 4)));
    CHECK(distance(narrow(a, 1, 7, 1), narrow(b, 1, 7, 1)) > 1e-4);
    for (const std::int64_t window : {1, 2}) {
      options.sliding_window = window;
      const Llama narrow_one = make(options);
      const Tensor all = narrow_one(x).detach();
      KeyValueCache cache;
      for (std::int64_t at = 0; at < 12; at += 3)
        CHECK(distance(narrow_one(narrow(x, 1, at, 3), cache).detach(), narrow(all, 1, at, 3)) < 1e-5);
      CHECK(cache[0].seen() == 12);
    }
  }
}

TEST_CASE("llama: a norm by one more than its weight is one by that sum, rounded once") {
  manual_seed(4);
  RmsNorm norm(8, 1e-5, {}, Gain::one_plus_weight), sum_of(8);
  CHECK(amax(abs(norm.weight.data())).item() == 0);
  const NoGrad guard;
  copy_(norm.weight.data(), randn({8}));
  copy_(sum_of.weight.data(), add(norm.weight.data(), 1));
  const Tensor x = randn({5, 8});
  CHECK(same_bits(norm(x), sum_of(x)));
  norm.to(bf16);
  copy_(sum_of.weight.data(), add(to(norm.weight.data(), f32), 1));
  const Tensor rounded = to(x, bf16);
  CHECK(same_bits(norm(rounded), to(sum_of(to(rounded, f32)), bf16)));
}

TEST_CASE("llama: sizes that do not go together are refused by name") {
  const auto refused = [](auto&& change, const std::string& word) {
    LlamaOptions options = tiny;
    change(options);
    CHECK(one_line_about(message_of<ValueError>([&] { Llama model(options); }), word));
  };
  refused([](LlamaOptions& o) { o.num_key_value_heads = 3; }, "3 of keys");
  refused([](LlamaOptions& o) { o.num_attention_heads = 5, o.num_key_value_heads = 5; }, "head_dim");
  refused([](LlamaOptions& o) { o.head_dim = 3; }, "width 3");
  refused([](LlamaOptions& o) { o.vocab_size = 0; }, "vocab_size 0");
  refused([](LlamaOptions& o) { o.num_attention_heads = 0; }, "num_attention_heads 0");
  refused([](LlamaOptions& o) { o.sliding_window = 0; }, "sliding_window 0");
  refused([](LlamaOptions& o) { o.layer_types = {Reach::all}; }, "1 entries for 2 layers");
  refused([](LlamaOptions& o) { o.layer_types = {Reach::all, Reach::window}; },
          "sliding_window is not given");
  for (const double share : {-1.0, 0.0, 0.25, 1.5, std::nan("")}) {  // of 4 features
    INFO(share);
    refused([&](LlamaOptions& o) { o.partial_rotary_factor = share; }, "features turn");
  }
  refused([](LlamaOptions& o) { o.query_pre_attn_scalar = 0; }, "query_pre_attn_scalar 0");
  refused([](LlamaOptions& o) { o.attn_logit_softcapping = -1; }, "attn_logit_softcapping -1");
  refused([](LlamaOptions& o) { o.final_logit_softcapping = std::nan(""); }, "final_logit_softcapping nan");
  refused([](LlamaOptions& o) { o.rope_local_base_freq = 0; }, "rope_local_base_freq 0");
  CHECK_THROWS_AS(make()(tokens({12})), ShapeError);
  LlamaOptions options = tiny;
  options.layer_types = {Reach::all, Reach::all};
  for (const std::int64_t layer : {2, -1})
    CHECK(one_line_about(message_of<ValueError>([&] { LlamaBlock(options, layer); }), "layer_types"));
}
