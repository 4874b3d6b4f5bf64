// Which tokens are drawn. The limits of temperature, and the context's end: tests/tools/generate_test.cpp.
#include "nn/generate.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;

namespace {

using Tokens = std::vector<std::int64_t>;

/// With logits far enough apart that chances differ.
Llama model_of(std::int64_t positions = 16) {
  manual_seed(3);
  Llama model({.vocab_size = 11,
               .hidden_size = 16,
               .intermediate_size = 24,
               .num_hidden_layers = 2,
               .num_attention_heads = 2,
               .max_position_embeddings = positions});
  const NoGrad guard;
  for (const Parameter& p : model.parameters())
    if (p.shape().rank() == 2) mul_(p.data(), 10.0);
  model.eval();
  return model;
}

}  // namespace

TEST_CASE("generate: greedy tokens are the likeliest of the whole sequence so far, for both models") {
  const auto check_greedy = [](const auto& model) {
    const NoGrad guard;
    Tokens all = {1, 2};
    const Tokens found = generate(model, all, {.max_new_tokens = 12, .temperature = 0});
    for (int i = 0; i < 12; ++i) {
      const Tensor logits = model(Tensor::from(all, {1, static_cast<std::int64_t>(all.size())}));
      all.push_back(argmax(select(logits, 1, -1), -1).template item<std::int64_t>());
    }
    CHECK(found == Tokens(all.begin() + 2, all.end()));
    CHECK(generate(model, Tokens{1, 2}, {.max_new_tokens = 12, .temperature = 2, .top_p = 1e-9}) == found);
    CHECK(generate(model, Tokens{1, 2}, {.max_new_tokens = 12, .temperature = 2, .top_k = 1}) == found);
  };
  check_greedy(model_of());
  manual_seed(4);
  Gpt gpt({.layers = 1, .heads = 2, .width = 8, .context = 14, .vocab = 11});
  gpt.eval();
  check_greedy(gpt);
}

TEST_CASE("generate: tokens come with their chances among the likeliest, up to top_p and top_k of them",
          "[one thread]") {
  const Llama model = model_of();
  const Tokens prompt = {5, 3, 7};
  const NoGrad guard;
  const Tensor logits = select(model(Tensor::from(prompt, {1, 3})), 1, 2);
  const double temperature = 1.5;
  const Picked sorted = sort(div(logits, temperature), -1, Order::descending);
  const std::vector<double> chances = doubles(softmax(sorted.values));
  const auto order = sorted.indices.to_vector<std::int64_t>();
  constexpr int draws = 600;
  for (const auto& [top_k, top_p] : {std::pair{0, 1.0}, {0, 0.9}, {0, 0.5}, {4, 1.0}, {4, 0.6}, {11, 0.99}}) {
    INFO(top_k << " " << top_p);
    // The fewest of the likeliest k that are together at least top_p of what these are.
    std::size_t kept = top_k > 0 ? static_cast<std::size_t>(top_k) : chances.size();
    double of_k = 0, sum = 0;
    for (std::size_t i = 0; i < kept; ++i) of_k += chances[i];
    std::size_t few = 0;
    while (few < kept && sum < top_p * of_k - 1e-9) sum += chances[few++];
    std::map<std::int64_t, int> counts;
    for (int seed = 0; seed < draws; ++seed)
      ++counts[generate(model, prompt,
                        {.max_new_tokens = 1,
                         .temperature = temperature,
                         .top_k = top_k,
                         .top_p = top_p,
                         .seed = static_cast<std::uint64_t>(seed)})[0]];
    for (std::size_t i = 0; i < chances.size(); ++i) {
      const double chance = i < few ? chances[i] / sum : 0;
      const double deviation = std::sqrt(draws * chance * (1 - chance));
      CHECK(std::abs(counts[order[i]] - draws * chance) <= 4.5 * deviation);
    }
  }
}

TEST_CASE("generate: it ends behind a stop token, tells each token, and leaves the generator as it was") {
  const Llama model = model_of(6);
  const RandomKey before = Context::current().generator().state();
  Tokens told;
  const GenerateOptions options{.max_new_tokens = 30, .temperature = 3, .seed = 5};
  const Tokens all = generate(model, Tokens{1}, options, [&](std::int64_t token) { told.push_back(token); });
  CHECK(all.size() == 30);
  CHECK(told == all);
  CHECK(Context::current().generator().state() == before);
  for (const std::int64_t stop : all) {
    GenerateOptions stopping = options;
    stopping.stop_tokens = {-1, stop};
    const auto end = std::find(all.begin(), all.end(), stop) + 1;
    CHECK(generate(model, Tokens{1}, stopping) == Tokens(all.begin(), end));
  }
  CHECK(generate(model, Tokens{1}, {.max_new_tokens = 0}).empty());
}

TEST_CASE("generate: what is out of range is refused in one line") {
  const Llama model = model_of();
  const auto refused = [&](const Tokens& prompt, const GenerateOptions& options, const std::string& word) {
    CHECK(one_line_about(message_of<ValueError>([&] { generate(model, prompt, options); }), word));
  };
  refused({}, {}, "the prompt is empty");
  refused({11}, {}, "outside the vocabulary of 11");
  refused({1}, {.max_new_tokens = -1}, "max_new_tokens -1");
  for (const double bad : {std::nan(""), -0.1, HUGE_VAL, 1.1e6})
    refused({1}, {.temperature = bad}, "temperature");
  refused({1}, {.top_k = -1}, "top_k -1");
  for (const double bad : {std::nan(""), 0.0, -0.1, 1.1}) refused({1}, {.top_p = bad}, "top_p");
}
