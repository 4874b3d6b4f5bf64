// The model: its cache, its training, sharded and in 16 bits. Values and gradients are the goldens'.
#include "nn/llama.h"

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
    CHECK(one_line_about(message_of<ShapeError>([&] { model(tokens({3, 1}), cache); }), "position 12"));
  }
  Tensor other = clone(x);
  fill_(narrow(other, 1, 7, 5), 3);
  CHECK(same_bits(narrow(model(other), 1, 0, 7), narrow(whole, 1, 0, 7)));
}

TEST_CASE(
    "llama: it learns, with tied embeddings and biases too, and in 16 bits as in 32 to their rounding") {
  for (const bool more : {false, true}) {
    LlamaOptions options = tiny;
    options.tie_word_embeddings = options.attention_bias = options.mlp_bias = more;
    if (more) options.head_dim = 6;
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
  const SwiGlu mlp(3, 4, {Bias::no, {f64}});
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
  CHECK_THROWS_AS(make()(tokens({12})), ShapeError);
}
