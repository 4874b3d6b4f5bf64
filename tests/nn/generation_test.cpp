// Several sequences at once: what transformers generates for each alone, beams, ranks that end at unlike
// times, texts that end a text, and how well a text is predicted. The numbers are made by
// tests/golden/make_generation.py.
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>

#include "collectives/world.h"
#include "nn/generate.h"
#include "nn/perplexity.h"
#include "nn/pretrained.h"
#include "nn/text_stream.h"
#include "runtime/generator.h"
#include "runtime/io/file_system.h"
#include "shard/fully_shard.h"
#include "tests/ranks.h"
#include "tests/runtime/harness.h"
#include "tests/source_root.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;
using nlohmann::json;
using Path = FileSystem::Path;

namespace {

using Tokens = std::vector<std::int64_t>;

const Path goldens = Path(source_root) / "tests/golden";

const json& expected() {
  static const json all = json::parse(posix_file_system().read(goldens / "generation/expected.json"));
  return all;
}

Llama family(const std::string& name) {
  Llama model = load_llama(goldens / "hugging_face" / name, f32);
  model.eval();
  return model;
}

/// With logits far enough apart that chances differ, and that another number's rounding changes no token.
template <class Model>
Model lively(Model model) {
  const NoGrad guard;
  for (const Parameter& p : model.parameters())
    if (p.shape().rank() == 2) mul_(p.data(), 10.0);
  model.eval();
  return model;
}
Gpt small_gpt(std::int64_t context = 16) {
  manual_seed(4);
  return lively(Gpt({.layers = 2, .heads = 2, .width = 8, .context = context, .vocab = 23}));
}
LlamaOptions small_options(std::int64_t positions = 16) {
  return {.vocab_size = 23,
          .hidden_size = 16,
          .intermediate_size = 24,
          .num_hidden_layers = 2,
          .num_attention_heads = 4,
          .num_key_value_heads = 2,
          .max_position_embeddings = positions};
}
Llama small_llama(std::int64_t positions = 16) {
  manual_seed(3);
  return lively(Llama(small_options(positions)));
}

/// Prompts of lengths from 1 on, with some alike.
std::vector<Tokens> random_prompts(std::size_t count, std::int64_t vocab, std::mt19937& random) {
  std::vector<Tokens> prompts(count);
  for (Tokens& prompt : prompts) {
    prompt.resize(1 + random() % 9);
    for (std::int64_t& token : prompt) token = static_cast<std::int64_t>(random()) % vocab;
  }
  return prompts;
}

}  // namespace

TEST_CASE("generation: greedy tokens of prompts of unlike lengths are transformers' for each alone") {
  for (const auto& [name, cases] : expected().at("greedy").items()) {
    INFO(name);
    const Llama model = family(name);
    std::vector<Tokens> prompts, tokens;
    for (const json& one : cases) {
      prompts.push_back(one.at("prompt"));
      tokens.push_back(one.at("tokens"));
    }
    const GenerateOptions options{.max_new_tokens = std::ssize(tokens[0]), .temperature = 0};
    CHECK(generate(model, prompts, options) == tokens);
    for (std::size_t row = 0; row < prompts.size(); ++row)
      CHECK(generate(model, prompts[row], options) == tokens[row]);
  }
}

TEST_CASE(
    "generation: a row draws what it draws alone, whoever its neighbours are and past the context too") {
  const auto check = [](const auto& model) {
    std::mt19937 random(7);
    const std::vector<Tokens> prompts = random_prompts(7, 23, random);
    for (const GenerateOptions& o :
         {GenerateOptions{.max_new_tokens = 30, .temperature = 2, .seed = 5},
          {.max_new_tokens = 9, .temperature = 1.5, .top_k = 5, .seed = 1},
          {.max_new_tokens = 12, .temperature = 3, .top_p = 0.7, .stop_tokens = {3, 8}},
          {.max_new_tokens = 25, .temperature = 0}}) {
      const std::vector<Tokens> all = generate(model, prompts, o);
      for (std::size_t row = 0; row < prompts.size(); ++row) {
        GenerateOptions alone = o;
        alone.seed = derived_seed(o.seed, row);
        CHECK(generate(model, prompts[row], alone) == all[row]);
      }
    }
  };
  check(small_gpt());
  check(small_llama());
}

TEST_CASE("generation: sequences come and go between steps, and each is what it is alone") {
  const Llama model = small_llama(24);
  std::mt19937 random(11);
  const std::vector<Tokens> prompts = random_prompts(12, 23, random);
  const auto options = [](std::size_t i) {
    return GenerateOptions{.max_new_tokens = 3 + static_cast<std::int64_t>(i * 5 % 17),
                           .temperature = i % 3 == 0 ? 0 : 2.0,
                           .seed = i};
  };
  std::vector<Tokens> found(prompts.size());
  SequenceBatch batch(model);
  std::size_t added = 0, most = 0, given_up = prompts.size();
  while (added < prompts.size() || !batch.done()) {
    for (std::size_t more = random() % 3; more > 0 && added < prompts.size(); --more, ++added)
      CHECK(batch.add(prompts[added], options(added)) == static_cast<std::int64_t>(added));
    most = std::max(most, batch.size());
    for (const NextToken& t : batch.step()) {
      const auto i = static_cast<std::size_t>(t.sequence);
      found[i].push_back(t.token);
      CHECK(t.last == (std::ssize(found[i]) == options(i).max_new_tokens));
    }
    if (given_up == prompts.size() && batch.size() > 3 && added > 6) {
      given_up = added - 1;
      batch.end(static_cast<std::int64_t>(given_up));
    }
  }
  CHECK(most > 3);
  REQUIRE(given_up < prompts.size());
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const Tokens alone = generate(model, prompts[i], options(i));
    CHECK(Tokens(alone.begin(), alone.begin() + std::ssize(found[i])) == found[i]);
    CHECK((i == given_up || alone.size() == found[i].size()));
  }
  CHECK(batch.step().empty());
}

TEST_CASE("generation: a callback hears each row's tokens in order, and ends a row") {
  const Gpt model = small_gpt();
  std::mt19937 random(3);
  const std::vector<Tokens> prompts = random_prompts(5, 23, random);
  const GenerateOptions o{.max_new_tokens = 12, .temperature = 2};
  const std::vector<Tokens> whole = generate(model, prompts, o);
  std::vector<Tokens> told(prompts.size());
  const std::vector<Tokens> all = generate(model, prompts, o, [&](std::size_t row, std::int64_t token) {
    told[row].push_back(token);
    return told[row].size() == row + 2 ? Sequel::ends : Sequel::goes_on;
  });
  CHECK(all == told);
  for (std::size_t row = 0; row < prompts.size(); ++row)
    CHECK(told[row] == Tokens(whole[row].begin(), whole[row].begin() + static_cast<std::ptrdiff_t>(row + 2)));
  CHECK(generate(model, std::vector<Tokens>{}, o).empty());
  CHECK(one_line_about(message_of<ValueError>([&] { generate(model, std::vector<Tokens>{{1}, {}}, o); }),
                       "empty"));
  CHECK(one_line_about(message_of<ValueError>([&] { generate(model, std::vector<Tokens>{{1}, {23}}, o); }),
                       "token 23 is outside the vocabulary of 23"));
}

TEST_CASE("generation: beams are transformers', with their scores") {
  for (const auto& [name, cases] : expected().at("beams").items()) {
    const Llama model = family(name);
    for (const json& one : cases) {
      INFO(name << " " << one.dump());
      const Tokens prompt = one.at("prompt");
      BeamOptions o{
          .beams = one.at("num_beams"), .max_new_tokens = 10, .length_penalty = one.at("length_penalty")};
      if (one.at("early_stopping") == true) o.end = BeamEnd::at_once;
      if (!one.at("eos_token_id").is_null()) o.stop_tokens = one.at("eos_token_id").get<Tokens>();
      const std::vector<Beam> beams = beam_search(model, std::span(&prompt, 1), o).at(0);
      const json& found = one.at("found");
      REQUIRE(beams.size() == found.size());
      for (std::size_t i = 0; i < beams.size(); ++i) {
        CHECK(beams[i].tokens == found[i].at("tokens").get<Tokens>());
        const double score = found[i].at("score");
        CHECK(std::abs(beams[i].score - score) < 1e-5 * (1 + std::abs(score)));
      }
    }
  }
}

TEST_CASE("generation: one beam is greedy, and beams are as many as prompts") {
  const Llama model = small_llama(40);
  std::mt19937 random(5);
  const std::vector<Tokens> prompts = random_prompts(4, 23, random);
  const auto beams = beam_search(model, prompts, {.beams = 1, .max_new_tokens = 9});
  const auto greedy = generate(model, prompts, {.max_new_tokens = 9, .temperature = 0});
  REQUIRE(beams.size() == prompts.size());
  for (std::size_t row = 0; row < prompts.size(); ++row) CHECK(beams[row].at(0).tokens == greedy[row]);
  const auto refused = [&](const BeamOptions& o, const std::string& word) {
    CHECK(one_line_about(message_of<ValueError>([&] { beam_search(model, prompts, o); }), word));
  };
  refused({.beams = 0}, "0 beams");
  refused({.max_new_tokens = 0}, "max_new_tokens 0");
  refused({.length_penalty = std::nan("")}, "length_penalty");
  refused({.beams = 12}, "24 candidates");
  refused({.max_new_tokens = 60}, "beyond the context of 40");
}

TEST_CASE(
    "generation: ranks of a sharded model write what the whole one does, though they end at unlike times") {
  const Llama whole = small_llama(24);
  std::mt19937 random(13);
  const std::vector<Tokens> prompts = random_prompts(9, 23, random);
  // As many as its number, so that the first rank has none.
  const auto of_rank = [&](int rank) {
    return std::vector<Tokens>(prompts.begin() + rank, prompts.begin() + 2 * rank);
  };
  const auto options = [](int rank) {
    return GenerateOptions{.max_new_tokens = 4 + 9 * rank, .temperature = 1.5, .stop_tokens = {7}, .seed = 3};
  };
  for (const int ranks : {2, 4})
    for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Llama model = whole.clone();
        for (LlamaBlock& block : model.model.layers) shard::fully_shard(block, {.layout = layout});
        shard::fully_shard(model, {.layout = layout});
        const int rank = world.rank();
        expect(generate(model, of_rank(rank), options(rank)) == generate(whole, of_rank(rank), options(rank)),
               "rank {} writes something else", rank);
        const BeamOptions beams{.beams = 3, .max_new_tokens = 3 + 2 * rank, .stop_tokens = {7}};
        const auto found = beam_search(model, of_rank(rank), beams),
                   alone = beam_search(whole, of_rank(rank), beams);
        expect(found.size() == alone.size(), "rank {} has {} results", rank, found.size());
        for (std::size_t i = 0; i < found.size(); ++i)
          expect(found[i].at(0).tokens == alone[i].at(0).tokens, "rank {} finds something else", rank);
      }));
}

TEST_CASE("generation: where one rank's call throws, so do the others', and they can go on") {
  const Llama whole = small_llama(24);
  for (const int ranks : {2, 4})
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      Llama model = whole.clone();
      for (LlamaBlock& block : model.model.layers) shard::fully_shard(block);
      shard::fully_shard(model);
      const int rank = world.rank(), last = world.size() - 1;
      const std::vector<Tokens> prompts{{1, 2, 3}};
      const GenerateOptions options{.max_new_tokens = 6, .temperature = 0};
      const auto message = [&](auto&& call) -> std::string {
        try {
          call();
        } catch (const Error& error) {
          return error.what();
        }
        return "";
      };
      // In the callback, at the third token.
      int heard = 0;
      const std::string in_callback = message([&] {
        generate(model, prompts, options, [&](std::size_t, std::int64_t) {
          check<ValueError>(rank != last || ++heard < 3, "the caller's own");
          return Sequel::goes_on;
        });
      });
      const std::string named = fmt::format("rank {} has ended", last);
      expect(in_callback.find(rank == last ? "the caller's own" : named) != std::string::npos, "got '{}'",
             in_callback);
      // By a prompt that is none.
      const std::vector<Tokens> own = rank == last ? std::vector<Tokens>{{99}} : prompts;
      const std::string in_prompt = message([&] { generate(model, own, options); });
      expect(in_prompt.find(rank == last ? "outside the vocabulary" : named) != std::string::npos, "got '{}'",
             in_prompt);
      expect(generate(model, prompts, options) == generate(whole, prompts, options), "it does not go on");
    }));
}

TEST_CASE("generation: a rank that ends while others generate ends them with an error") {
  const Llama whole = small_llama(24);
  CHECK_THROWS_AS(run_ranks(2,
                            [&](World& world) {
                              Llama model = whole.clone();
                              shard::fully_shard(model);
                              check<ValueError>(world.rank() == 0, "this rank does not generate");
                              generate(model, std::vector<Tokens>{{1, 2}}, {.max_new_tokens = 8});
                            }),
                  ValueError);
}

TEST_CASE("generation: what stops a text is not written, wherever tokens cut it") {
  std::mt19937 random(17);
  const auto letters = [&](std::size_t count) {
    std::string text;
    for (std::size_t i = 0; i < count; ++i) text += "ab\xc3\xa4"[random() % 3 == 2 ? 2 : random() % 2];
    std::string sound;
    for (const char c : text) sound += c == '\xc3' ? std::string("\xc3\xa4") : std::string(1, c);
    return sound;
  };
  int stopped = 0;
  for (int round = 0; round < 500; ++round) {
    const std::string text = letters(1 + random() % 20);
    std::vector<std::string> stops;
    for (std::size_t i = random() % 4; i > 0; --i) stops.push_back(letters(1 + random() % 4));
    // The one that is complete first, of those the longest.
    std::size_t end = std::string::npos, begin = text.size();
    for (const std::string& stop : stops)
      if (const std::size_t at = text.find(stop); at != std::string::npos)
        if (at + stop.size() < end || (at + stop.size() == end && at < begin))
          begin = at, end = at + stop.size();
    StopTexts stream(stops);
    std::string out;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t piece = std::min<std::size_t>(random() % 4, text.size() - at);
      out += stream.step(text.substr(at, piece));
      at += piece;
      CHECK(text.substr(0, begin).starts_with(out));
    }
    out += stream.finish();
    INFO(text << " " << json(stops).dump());
    CHECK(stream.stopped() == (end != std::string::npos));
    CHECK(out == text.substr(0, begin));
    stopped += stream.stopped();
  }
  CHECK(stopped > 100);
  CHECK(one_line_about(message_of<ValueError>([] { StopTexts({"a", ""}); }), "empty"));
  CHECK(one_line_about(message_of<ValueError>([] { StopTexts({"\xa4"}); }), "UTF-8"));
}

TEST_CASE("generation: a text stream gives what decoding all tokens gives, up to a stop text") {
  for (const std::string name : {"gpt2.json", "llama2.json", "gemma.model"}) {
    INFO(name);
    std::optional<Tokenizer> tokenizer;
    try {
      tokenizer = Tokenizer::read(goldens / "tokenizers" / name);
    } catch (const NotImplementedError&) {
      continue;
    }
    const std::string prompt = "The first line",
                      rest = " of \xe4\xb8\xad\xe6\x96\x87 \xf0\x9f\x99\x82 text. User: go on";
    const Tokens behind = tokenizer->encode(prompt);
    Tokens all = tokenizer->encode(prompt + rest);
    const auto written = [&](std::vector<std::string> stops) {
      TextStream stream(*tokenizer, {.stop_texts = std::move(stops)});
      std::string text;
      for (const std::int64_t token : all) text += stream.step(token);
      return text + stream.finish();
    };
    CHECK(written({}) == tokenizer->decode(all));
    CHECK(written({"xyz", "User:"}) ==
          tokenizer->decode(all).substr(0, tokenizer->decode(all).find("User:")));
    // Behind a prompt a token's space is text.
    const Tokens next = tokenizer->encode(" word", {.add_special_tokens = false});
    TextStream stream(*tokenizer, {.behind = behind});
    std::string text;
    for (const std::int64_t token : next) text += stream.step(token);
    Tokens joined = behind;
    joined.insert(joined.end(), next.begin(), next.end());
    CHECK(tokenizer->decode(behind) + text + stream.finish() == tokenizer->decode(joined));
  }
}

TEST_CASE("generation: perplexity is transformers'") {
  for (const auto& [name, cases] : expected().at("perplexity").items()) {
    INFO(name);
    const Path folder = goldens / "generation" / name;
    std::optional<Tokenizer> tokenizer;
    try {
      tokenizer = Tokenizer::read(goldens / "tokenizers" / (name == "gpt2" ? "gpt2.json" : "llama2.json"));
    } catch (const NotImplementedError&) {
      continue;
    }
    const Tokens tokens = tokenizer->encode(posix_file_system().read(Path(source_root) / "LICENSE"));
    const auto check_all = [&](auto model) {
      model.eval();
      for (const json& one : cases) {
        const Perplexity found =
            perplexity(model, tokens, {.context = one.at("context"), .stride = one.at("stride")});
        CHECK(found.tokens == one.at("tokens").get<std::int64_t>());
        const double value = std::exp(one.at("nats").get<double>() / one.at("tokens").get<double>());
        CHECK(std::abs(found.value() - value) < 1e-4 * value);
        CHECK(std::abs(found.per_token() - std::log(value)) < 1e-5);
      }
      // Windows as long as the text are the text.
      const std::span<const std::int64_t> some = std::span(tokens).first(60);
      const Perplexity once = perplexity(model, some, {.context = 64});
      CHECK(once.tokens == 59);
      CHECK(perplexity(model, some.first(1)).tokens == 0);
      for (const PerplexityOptions& bad :
           {PerplexityOptions{.context = 65}, {.context = 1}, {.context = 8, .stride = 9}})
        CHECK_THROWS_AS(perplexity(model, some, bad), ValueError);
      CHECK_THROWS_AS(perplexity(model, Tokens{0, 100000}), ValueError);
    };
    if (name == "gpt2")
      check_all(load_gpt(folder, f32));
    else
      check_all(load_llama(folder, f32));
  }
}

TEST_CASE("generation: the tokens that end a text are those of generation_config.json, else of config.json") {
  CHECK(end_tokens(goldens / "generation/gpt2") == Tokens{640});
  CHECK(end_tokens(goldens / "generation/llama") == Tokens{2, 7});
  CHECK(end_tokens(goldens / "hugging_face/llama") == Tokens{2});
  const TempDirectory folder;
  const auto put = [&](const char* name, const std::string& text) {
    const std::unique_ptr<OutputFile> file = posix_file_system().create(folder / name);
    file->write(text);
    file->close();
  };
  CHECK(end_tokens(folder.path()).empty());
  put("config.json", R"({"eos_token_id": null})");
  CHECK(end_tokens(folder.path()).empty());
  put("generation_config.json", R"({"eos_token_id": [1, "a"]})");
  CHECK(one_line_about(message_of<ValueError>([&] { end_tokens(folder.path()); }), "eos_token_id"));
}

TEST_CASE("generation: rows of a cache are kept, repeated and joined, and a copy goes its own way") {
  const Llama model = small_llama(40);
  const NoGrad guard;
  const Tensor a = Tensor::from({1, 2, 3, 4, 5, 6}, {2, 3}), b = Tensor::from({7, 8, 9, 10, 11}, {1, 5});
  KeyValueCache cache, other;
  model(a, cache);
  model(b, other);
  const KeyValueCache before = cache;
  cache.join(other);
  CHECK(Tokens(cache.rows().begin(), cache.rows().end()) == Tokens{3, 3, 5});
  const Tensor next = Tensor::from({12, 13, 14, 15}, {2, 2});
  cache.select(Tokens{2, 0});
  const Tensor logits = model(next, cache);
  const auto whole = [&](const Tokens& tokens) {
    return model(Tensor::from(tokens, {1, std::ssize(tokens)}));
  };
  CHECK(distance(select(logits, 0, 0), select(narrow(whole({7, 8, 9, 10, 11, 12, 13}), 1, 5, 2), 0, 0)) <
        1e-4);
  CHECK(distance(select(logits, 0, 1), select(narrow(whole({1, 2, 3, 14, 15}), 1, 3, 2), 0, 0)) < 1e-4);
  // The copy, and a copy of it that sees something else.
  KeyValueCache one = before, two = before;
  const Tensor here = model(Tensor::from({3, 3}, {2, 1}), one),
               there = model(Tensor::from({4, 4}, {2, 1}), two);
  CHECK(distance(select(here, 0, 0), select(narrow(whole({1, 2, 3, 3}), 1, 3, 1), 0, 0)) < 1e-4);
  CHECK(distance(select(there, 0, 0), select(narrow(whole({1, 2, 3, 4}), 1, 3, 1), 0, 0)) < 1e-4);
  CHECK_THROWS_AS(cache.select(Tokens{2}), ValueError);
  CHECK_THROWS_AS(model(Tensor::from({1}, {1, 1}), cache), ShapeError);
}
