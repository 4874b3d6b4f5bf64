// The model: its cache, its dropout, its training, and many threads at once.
#include "nn/gpt.h"

#include <atomic>
#include <cmath>
#include <thread>

#include "nn/llama.h"
#include "nn/optimizer.h"
#include "nn/recurrent.h"
#include "nn/transformer.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;

namespace {

constexpr GptOptions tiny{.layers = 2, .heads = 2, .width = 16, .context = 12, .vocab = 20};

Gpt make(GptOptions options = tiny, unsigned seed = 1) {
  manual_seed(seed);
  return Gpt(options);
}

Tensor tokens(const Shape& shape, unsigned seed = 1) { return numbers(shape, i64, seed, 0, 19); }

Tensor loss_of(const Gpt& model, const Tensor& x, const Tensor& y) {
  const Tensor logits = model(x);
  return cross_entropy(reshape(logits, {-1, logits.size(-1)}), reshape(y, {-1}));
}

}  // namespace

TEST_CASE("gpt: logits from a cache are those of the whole sequence") {
  Gpt model = make();
  model.eval();
  const NoGrad guard;
  const Tensor x = tokens({3, 12}), whole = model(x);
  for (const std::vector<std::int64_t>& cut :
       {std::vector<std::int64_t>{12}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {5, 1, 6}, {1, 11}}) {
    KeyValueCache cache;
    std::int64_t at = 0;
    for (std::int64_t n : cut) {
      const Tensor logits = model(narrow(x, 1, at, n), cache);
      CHECK(distance(logits, narrow(whole, 1, at, n)) < 1e-5);
      at += n;
    }
    CHECK(one_line_about(message_of<ShapeError>([&] { model(tokens({3, 1}), cache); }), "context"));
  }
}

TEST_CASE("stacks of more layers than any memory holds are refused before the first is made") {
  for (const std::int64_t layers : {std::int64_t{65537}, std::int64_t{1} << 40, INT64_MAX}) {
    const auto refused = [&](const auto& make) {
      CHECK(one_line_about(message_of<ValueError>(make), fmt::format("{}", layers)));
      CHECK(one_line_about(message_of<ValueError>(make), "65536"));
    };
    const DefaultOptions nowhere({.device = Device::meta()});
    refused([&] { Gpt({.layers = layers}); });
    refused([&] { Llama({.num_hidden_layers = layers}); });
    refused([&] { Transformer({.encoder_layers = layers}); });
    refused([&] { Transformer({.decoder_layers = layers}); });
    refused([&] { Lstm(2, 3, {.layers = layers}); });
  }
}

TEST_CASE("gpt: a position does not see what follows") {
  Gpt model = make();
  model.eval();
  const NoGrad guard;
  Tensor x = tokens({1, 12});
  const Tensor before = model(x);
  fill_(narrow(x, 1, 7, 5), 3);
  const Tensor after = model(x);
  CHECK(same_bits(narrow(before, 1, 0, 7), narrow(after, 1, 0, 7)));
  CHECK_FALSE(same_bits(before, after));
}

TEST_CASE("gpt: what does not fit is refused in one line") {
  const Gpt model = make();
  CHECK(one_line_about(message_of<ShapeError>([&] { model(tokens({4})); }), "Gpt"));
  CHECK(one_line_about(message_of<ShapeError>([&] { model(tokens({1, 13})); }), "context"));
  CHECK(one_line_about(message_of<ValueError>([&] { model(full({1, 1}, 20, {i64})); }), "embedding"));
  CHECK_THROWS_AS(Gpt({.heads = 3, .width = 16}), ValueError);
  CHECK_THROWS_AS(Gpt({.layers = 0}), ValueError);
}

TEST_CASE("gpt: the embedding is tied to the head, and parameters are counted once") {
  const Gpt model = make();
  CHECK(model.tok.weight.object() == model.head.weight.object());
  const std::int64_t w = 16, block = 4 * w + (3 * w * w + 3 * w) + (w * w + w) + (4 * w * w + 4 * w) +
                                     (4 * w * w + w);
  CHECK(model.parameter_count() == 20 * w + 12 * w + 2 * block + 2 * w);
  const Gpt copy = model.clone();
  CHECK(copy.tok.weight.object() == copy.head.weight.object());
  const NoGrad guard;
  CHECK(same_bits(copy(tokens({2, 5})), model(tokens({2, 5}))));
}

TEST_CASE(
    "gpt: a layer in 8 bits is linear_fp8, whatever it is followed by, and the model is near the exact one") {
  const Gpt exact = make();
  const Tensor tokens = randint(0, 20, {2, 8}, {i64}), x = randn({3, 16}), residual = randn({3, 8});
  for (const auto& [products, scales] : {std::pair{Products::fp8, EightScales::of_tensors},
                                         std::pair{Products::fp8_rows, EightScales::of_rows}}) {
    const Linear layer(16, 8, {.products = products});
    const Tensor y = linear_fp8(x, layer.weight, layer.bias, scales);
    CHECK(same_bits(layer(x), y));
    CHECK(same_bits(layer(x, Activation::gelu), gelu(y)));
    CHECK(same_bits(layer(x, residual), add(residual, y)));
    GptOptions options = tiny;
    options.products = products;
    const Tensor off = sub(make(options)(tokens), exact(tokens)).detach(), size = exact(tokens).detach();
    const double distance = order_free_norm(std::span(&off, 1)).item();
    CHECK(distance > 0);
    CHECK(distance < 0.1 * order_free_norm(std::span(&size, 1)).item());
  }
}

TEST_CASE("gpt: dropout acts in training alone and follows the seed") {
  for (double GptOptions::* which : {&GptOptions::dropout, &GptOptions::embedding_dropout}) {
    GptOptions options = tiny;
    options.*which = 0.3;
    Gpt model = make(options);
    const NoGrad guard;
    const Tensor x = tokens({2, 8});
    const auto with_seed = [&](std::uint64_t seed) {
      manual_seed(seed);
      return model(x);
    };
    CHECK(same_bits(with_seed(5), with_seed(5)));
    CHECK_FALSE(same_bits(with_seed(5), with_seed(6)));
    model.eval();
    CHECK(same_bits(with_seed(5), with_seed(6)));
    Gpt plain = make();
    plain.load_state_dict(model.state_dict());
    CHECK(same_bits(plain(x), model(x)));
  }
}

TEST_CASE("gpt: a head of its own learns apart from the embedding, and GELU's forms are close") {
  GptOptions options = tiny;
  options.tie_word_embeddings = false;
  options.gelu = GeluForm::tanh;
  Gpt model = make(options);
  CHECK_FALSE(model.tok.weight.object() == model.head.weight.object());
  CHECK(model.parameter_count() == make().parameter_count() + 20 * 16);
  const Tensor x = tokens({2, 8});
  loss_of(model, x, x).backward();
  CHECK(model.tok.weight.grad().defined());
  CHECK(model.head.weight.grad().defined());
  options.gelu = GeluForm::erf;
  Gpt other = make(options);
  other.load_state_dict(model.state_dict());
  const NoGrad guard;
  CHECK_FALSE(same_bits(other(x), model(x)));
  CHECK(distance(other(x), model(x)) < 1e-3);
}

TEST_CASE("gpt: gradients are those of finite differences") {
  Gpt model = make({.layers = 1, .heads = 2, .width = 4, .context = 4, .vocab = 5});
  model.to(f64);
  const Tensor x = numbers({2, 4}, i64, 1, 0, 4), y = numbers({2, 4}, i64, 2, 0, 4);
  loss_of(model, x, y).backward();
  const NoGrad guard;
  for (const NamedParameter& p : model.named_parameters()) {
    INFO(p.name);
    const std::vector<double> given = doubles(p.parameter.grad());
    const Tensor data = p.parameter.data();
    double worst = 0;
    for (std::size_t i = 0; i < given.size(); i += 3) {
      double& value = data.mutable_data<double>()[i];
      const double kept = value, step = 1e-5;
      value = kept + step;
      const double above = loss_of(model, x, y).item();
      value = kept - step;
      const double below = loss_of(model, x, y).item();
      value = kept;
      worst = std::max(worst, std::abs(given[i] - (above - below) / (2 * step)));
    }
    CHECK(worst < 1e-7);
  }
}

TEST_CASE("gpt: training is the same to the bit for every number of threads, and learns") {
  const auto train = [](int threads) {
    const Threads scope(threads);
    GptOptions options = tiny;
    options.dropout = 0.1;
    Gpt model = make(options);
    AdamW adam(model.parameters(), {.lr = 1e-2});
    std::vector<double> losses;
    const Tensor text = tokens({4, 13}, 3);
    for (int i = 0; i < 25; ++i) {
      const Tensor loss = loss_of(model, narrow(text, 1, 0, 12), narrow(text, 1, 1, 12));
      adam.zero_grad();
      loss.backward();
      clip_grad_norm_(model.parameters(), 1);
      adam.step();
      losses.push_back(loss.item());
    }
    return losses;
  };
  const std::vector<double> one = train(1);
  CHECK(train(2) == one);
  CHECK(train(3) == one);
  CHECK(one.front() > 2.5);
  CHECK(one.back() < one.front() - 1);
}

TEST_CASE("gpt: four threads share one model for inference while a fifth trains another") {
  Gpt shared = make();
  shared.eval();
  const Gpt& model = shared;
  const Tensor x = tokens({2, 12});
  Tensor expected;
  {
    const NoGrad guard;
    expected = model(x);
  }
  std::atomic<int> right = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      Context::current().set_threads(1);
      const NoGrad guard;
      for (int k = 0; k < 10; ++k) {
        KeyValueCache cache;
        const bool whole = same_bits(model(x), expected);
        const bool cached = distance(model(x, cache), expected) < 1e-5;
        right += whole && cached;
      }
    });
  double first = 0, last = 0;
  threads.emplace_back([&] {
    Context::current().set_threads(2);
    Gpt own = make(tiny, 2);
    AdamW adam(own.parameters(), {.lr = 1e-2});
    for (int k = 0; k < 10; ++k) {
      const Tensor loss = loss_of(own, narrow(x, 1, 0, 11), narrow(x, 1, 1, 11));
      adam.zero_grad();
      loss.backward();
      adam.step();
      (k == 0 ? first : last) = loss.item();
    }
  });
  for (std::thread& t : threads) t.join();
  CHECK(right == 40);
  CHECK(last < first);
  for (const Parameter& p : model.parameters()) CHECK_FALSE(p.grad().defined());
}
