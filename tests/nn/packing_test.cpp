// Documents in one forward: what each has alone, and rows in which every token stands once.
#include "nn/packing.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "nn/batch_sampler.h"
#include "nn/compile.h"
#include "nn/llama.h"
#include "nn/lora.h"
#include "nn/pretrained.h"
#include "runtime/ops.h"
#include "tests/message_of.h"
#include "tests/runtime/harness.h"
#include "tests/source_root.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;
using Path = FileSystem::Path;

namespace {

const Path goldens = Path(source_root) / "tests/golden/hugging_face";

/// Documents of random lengths up to `longest`, some with prompts.
TokenizedText random_text(unsigned seed, int documents, int longest, int vocabulary = 64) {
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(n)); };
  TokenizedText text;
  for (int d = 0; d < documents; ++d) {
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(1 + below(longest)));
    for (std::int64_t& token : tokens) token = below(vocabulary);
    const auto length = static_cast<int>(tokens.size());
    text.add(tokens, below(3) == 0 ? below(length + 1) : 0);
  }
  return text;
}

std::vector<std::int64_t> all_rows(const Packing& packing) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(packing.rows()));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

std::vector<std::int64_t> numbers(const Tensor& t) {
  return {t.data<std::int64_t>(), t.data<std::int64_t>() + t.numel()};
}

/// Logits of each document alone, one behind another: (N, vocabulary).
template <class Model>
Tensor one_by_one(const Model& model, const Tensor& tokens, const Documents& documents) {
  std::vector<Tensor> logits;
  std::int64_t start = 0;
  const Tensor flat = reshape(tokens, {1, -1});
  for (const std::int64_t length : documents.lengths) {
    logits.push_back(flatten(model(narrow(flat, 1, start, length)), 0, 1));
    start += length;
  }
  return cat(logits, 0);
}

std::map<std::string, Tensor> gradients(const Module& model) {
  std::map<std::string, Tensor> found;
  for (const NamedParameter& p : model.named_parameters())
    if (p.parameter.grad().defined()) found.emplace(p.name, clone(p.parameter.grad()));
  return found;
}

template <class Model>
void check_as_alone(Model& model, const PackedBatch& batch) {
  const Tensor logits = model(batch.tokens, batch.documents),
               alone = one_by_one(model, batch.tokens, batch.documents);
  const double size = std::max(1.0, amax(abs(alone.detach())).item());
  CHECK(distance(flatten(logits, 0, 1).detach(), alone.detach()) < 1e-5 * size);
  packed_loss(logits, batch.targets, batch.learnt).backward();
  const auto packed = gradients(model);
  model.zero_grad();
  cross_entropy(alone, flatten(batch.targets)).backward();
  const auto expected = gradients(model);
  model.zero_grad();
  REQUIRE(packed.size() == expected.size());
  for (const auto& [name, gradient] : packed) {
    INFO(name);
    CHECK(distance(gradient, expected.at(name)) < 2e-5 * std::max(1.0, amax(abs(expected.at(name))).item()));
  }
}

}  // namespace

TEST_CASE("documents: logits, loss and gradients of each family are those of the documents one by one") {
  for (const char* name : {"llama_linear", "llama_dynamic", "llama_yarn", "mistral", "qwen2", "qwen3",
                           "gemma2", "gemma3", "phi3"}) {
    INFO(name);
    Llama model = load_llama(goldens / name, f32);
    for (const unsigned seed : {1U, 2U}) {
      const Packing packing(random_text(seed, 9, 12), {.context = 12});
      PackedBatch batch = packing.batch(all_rows(packing));
      check_as_alone(model, batch);
      if (batch.tokens.numel() % 2 == 0) {  // rows need not end where documents do
        batch.tokens = reshape(batch.tokens, {2, -1});
        const Tensor logits = model(batch.tokens, batch.documents);
        CHECK(distance(flatten(logits, 0, 1).detach(),
                       one_by_one(model, batch.tokens, batch.documents).detach()) < 1e-4);
      }
    }
  }
  Gpt model = load_gpt(goldens / "gpt2", f32);
  const Packing packing(random_text(3, 9, 20), {.context = 20});
  check_as_alone(model, packing.batch(all_rows(packing)));
}

TEST_CASE("documents: a compiled model is the eager one, whatever the lengths") {
  Llama eager = load_llama(goldens / "llama_linear", f32), compiled = eager.clone();
  nn::compile(compiled);
  for (const unsigned seed : {4U, 5U, 4U}) {
    const Packing packing(random_text(seed, 4, 8), {.context = 8});
    const PackedBatch batch = packing.batch(all_rows(packing));
    CHECK(same_bits(eager(batch.tokens, batch.documents).detach(),
                    compiled(batch.tokens, batch.documents).detach()));
  }
}

TEST_CASE("documents: lengths that do not fill the tokens, or are beyond the positions, are refused") {
  Llama llama(LlamaOptions{.hidden_size = 16, .num_hidden_layers = 1, .max_position_embeddings = 6});
  Gpt gpt(GptOptions{.layers = 1, .width = 16, .context = 6});
  const Tensor tokens = zeros({2, 5}, {i64, Device::cpu()});
  const auto refuses = [&](std::vector<std::int64_t> lengths, const std::string& why) {
    const Documents documents{std::move(lengths)};
    CHECK_THAT(message_of<ShapeError>([&] { llama(tokens, documents); }), ContainsSubstring(why));
    CHECK_THAT(message_of<ShapeError>([&] { gpt(tokens, documents); }), ContainsSubstring(why));
  };
  refuses({5, 4}, "of 9 tokens in all, and there are 10");
  refuses({6, 5}, "of 11 tokens in all, and there are 10");
  refuses({}, "of 0 tokens in all");
  const Tensor nothing = zeros({1, 0}, {i64, Device::cpu()});
  for (const Documents& none : {Documents{}, Documents{{}}}) {
    CHECK(llama(nothing, none).shape() == Shape{1, 0, 256});
    CHECK(gpt(nothing, none).shape() == Shape{1, 0, 256});
  }
  refuses({5, 0, 5}, "a document of 0 tokens; each has from 1 to 6");
  refuses({-1, 11}, "a document of -1 tokens");
  refuses({7, 3}, "a document of 7 tokens");
  CHECK(llama(tokens, Documents{{6, 4}}).shape() == Shape{2, 5, 256});
  CHECK(gpt(tokens, Documents{{6, 4}}).shape() == Shape{2, 5, 256});
}

TEST_CASE(
    "packing: every token that teaches stands once, in pieces of its document, and all are learnt that "
    "should") {
  for (const unsigned seed : {1U, 2U, 3U, 4U})
    for (const std::int64_t context : {2, 7, 16, 100}) {
      INFO("seed " << seed << ", context " << context);
      const TokenizedText text = random_text(seed, 40, 30, 1000000);
      const Packing packing(text, {.context = context});
      std::vector<std::int64_t> inputs, learnt;
      std::int64_t counted = 0, tokens = 0, open = 0;
      for (std::int64_t row = 0; row < packing.rows(); ++row) {
        const std::vector<std::int64_t> one = {row};
        const PackedBatch batch = packing.batch(one);
        CHECK(batch.tokens.numel() <= context);
        CHECK(batch.tokens.numel() == packing.tokens(row));
        CHECK(batch.learnt == packing.learnt(row));
        CHECK(batch.learnt > 0);
        CHECK(std::ranges::is_sorted(batch.documents.lengths, std::ranges::greater()));
        CHECK(std::accumulate(batch.documents.lengths.begin(), batch.documents.lengths.end(),
                              std::int64_t{0}) == batch.tokens.numel());
        open += packing.tokens(row) <= context / 2;
        for (const std::int64_t token : numbers(batch.tokens)) inputs.push_back(token);
        for (const std::int64_t target : numbers(batch.targets))
          if (target != -100) learnt.push_back(target);
        counted += batch.learnt, tokens += packing.tokens(row);
      }
      CHECK(open <= 1);  // two of them would be one row
      std::vector<std::int64_t> all, due;
      std::int64_t begin = 0;
      for (std::size_t d = 0; d < text.ends.size(); begin = text.ends[d++]) {
        const std::int64_t first = begin + std::max<std::int64_t>(text.prompts[d], 1), end = text.ends[d];
        const std::span document(text.tokens);
        for (std::int64_t i = first; i < end; ++i) due.push_back(document[static_cast<std::size_t>(i)]);
        // Of each piece all of its tokens, where one of those that follow them is due.
        for (std::int64_t at = begin; at < end; at += context) {
          const std::int64_t to = std::min(at + context, end);
          if (std::max(first, at + 1) >= std::min(to + 1, end)) continue;
          for (std::int64_t i = at; i < to; ++i) all.push_back(document[static_cast<std::size_t>(i)]);
        }
      }
      CHECK(text.learnt() == static_cast<std::int64_t>(due.size()));
      CHECK(tokens == static_cast<std::int64_t>(all.size()));
      CHECK(counted == static_cast<std::int64_t>(due.size()));
      for (auto* list : {&all, &due, &inputs, &learnt}) std::ranges::sort(*list);
      CHECK(inputs == all);
      CHECK(learnt == due);
    }
}

TEST_CASE("packing: batches of any rows, in any order, have a finite loss and gradients") {
  Gpt model(GptOptions{.layers = 1, .width = 16, .context = 8});
  TokenizedText text;
  // Prompts that fill rows, tokens that follow none, and pieces of one token.
  for (const std::int64_t length : {1, 8, 9, 1, 16, 17, 3, 1})
    text.add(std::vector<std::int64_t>(static_cast<std::size_t>(length), 5), length > 3 ? length - 1 : 0);
  const Packing packing(text, {.context = 8});
  EpochSampler sampler(packing.rows(), {.batch = 1});
  for (std::int64_t step = 0; step < 2 * sampler.steps_per_epoch(); ++step) {
    const PackedBatch batch = packing.batch(sampler.next());
    const Tensor loss = packed_loss(model, batch, batch.learnt);
    CHECK(std::isfinite(loss.item()));
    loss.backward();
    for (const auto& [name, gradient] : gradients(model)) CHECK(std::isfinite(sum(abs(gradient)).item()));
    model.zero_grad();
  }
}

TEST_CASE("packing: a model's loss and gradients are those of its logits, without holding them") {
  const auto check_same = [](auto model) {
    const Packing packing(random_text(6, 20, 12), {.context = 12});
    const PackedBatch batch = packing.batch(all_rows(packing));
    const Tensor of_logits = packed_loss(model(batch.tokens, batch.documents), batch.targets, batch.learnt);
    of_logits.backward();
    const auto expected = gradients(model);
    model.zero_grad();
    const Tensor loss = packed_loss(model, batch, batch.learnt);
    loss.backward();
    CHECK(std::abs(loss.item() - of_logits.item()) < 1e-5 * std::abs(of_logits.item()));
    const auto found = gradients(model);
    REQUIRE(found.size() == expected.size());
    for (const auto& [name, gradient] : found) {
      INFO(name);
      CHECK(distance(gradient, expected.at(name)) <
            2e-5 * std::max(1.0, amax(abs(expected.at(name))).item()));
    }
    const NoGrad guard;
    CHECK(std::abs(packed_loss(model, batch, batch.learnt).item() - of_logits.item()) <
          1e-5 * std::abs(of_logits.item()));
  };
  for (const char* name : {"llama_linear", "qwen2", "gemma2"}) {  // the last caps its logits
    INFO(name);
    check_same(load_llama(goldens / name, f32));
  }
  check_same(load_gpt(goldens / "gpt2", f32));
  Llama adapted = load_llama(goldens / "llama_linear", f32);
  add_lora(adapted, {.rank = 2, .alpha = 4, .targets = {"lm_head"}});
  check_same(std::move(adapted));
}

TEST_CASE("packing: the losses of parts, over what all learn, add up to the loss of the whole") {
  Llama model = load_llama(goldens / "llama_linear", f32);
  const Packing packing(random_text(6, 20, 12), {.context = 16});
  const PackedBatch whole = packing.batch(all_rows(packing));
  const NoGrad guard;
  const double loss = packed_loss(model, whole, whole.learnt).item();
  double sum = 0;
  for (std::int64_t row = 0; row < packing.rows(); ++row) {
    const PackedBatch part = packing.batch(std::vector{row});
    sum += packed_loss(model, part, whole.learnt).item();
  }
  CHECK(std::abs(sum - loss) < 1e-5);
}

TEST_CASE("packing: what is no text, no row or no context is refused") {
  TokenizedText text;
  const std::vector<std::int64_t> none, some = {1, 2, 3};
  CHECK_THAT(message_of<ValueError>([&] { Packing(text, {.context = 8}); }),
             ContainsSubstring("a text of 0 documents of which nothing is learnt"));
  CHECK_THAT(message_of<ValueError>([&] { text.add(none); }), ContainsSubstring("without tokens"));
  CHECK_THAT(message_of<ValueError>([&] { text.add(some, 4); }), ContainsSubstring("a prompt of 4 tokens"));
  CHECK_THAT(message_of<ValueError>([&] { text.add(some, -1); }), ContainsSubstring("a prompt of -1"));
  for (const std::int64_t token : {std::int64_t{-1}, std::int64_t{1} << 31})
    CHECK_THAT(message_of<ValueError>([&] { text.add(std::vector{token}); }), ContainsSubstring("2^31"));
  CHECK(text.documents() == 0);
  text.add(some, 3);
  text.add(std::vector<std::int64_t>{4});
  CHECK_THAT(message_of<ValueError>([&] { Packing(text, {.context = 8}); }),
             ContainsSubstring("a text of 2 documents of which nothing is learnt"));
  text.add(some);
  CHECK_THAT(message_of<ValueError>([&] { Packing(text, {.context = 1}); }), ContainsSubstring("context 1"));
  const Packing packing(text, {.context = 8});
  CHECK(packing.learnt(0) == 2);
  CHECK_THAT(message_of<ValueError>([&] { packing.batch(none); }), ContainsSubstring("no rows"));
  for (const std::int64_t row : {-1, 1})
    CHECK_THAT(message_of<ValueError>([&] { packing.batch(std::vector{row}); }), ContainsSubstring("of 1"));
  CHECK_THAT(message_of<ValueError>([&] { packed_loss(zeros({1, 2, 3}, {}), zeros({1, 2}, {i64}), 0); }),
             ContainsSubstring("divided by 0"));
  for (const auto& broken : {TokenizedText{{1, 2}, {1}, {0}}, TokenizedText{{1, 2}, {2}, {3}},
                             TokenizedText{{1, 2}, {2}, {}}, TokenizedText{{1, 2}, {1, 1, 2}, {0, 0, 0}},
                             TokenizedText{{1, 2}, {3}, {0}}, TokenizedText{{1, 2}, {2}, {-1}}})
    CHECK_THROWS_AS(Packing(broken, {.context = 8}), ValueError);
}
