// `sherd generate` and `sherd evaluate`, with the models that tests/golden/make_generation.py makes.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "nn/generate.h"
#include "nn/pretrained.h"
#include "nn/tokenizer.h"
#include "runtime/error.h"
#include "tests/source_root.h"
#include "tests/tools/command.h"
#include "tools/predict.h"
#include "tools/write_text.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;
using Path = FileSystem::Path;
using Tokens = std::vector<std::int64_t>;

namespace {

const Path goldens = Path(source_root) / "tests/golden";

/// A folder as the Hub has it, in `root`; one whose tokenizer this build cannot read is none.
std::optional<Path> model_folder(const TempDirectory& root, const std::string& name) {
  const Path folder = root / name;
  std::filesystem::copy(goldens / "generation" / name, folder);
  std::filesystem::copy(goldens / "tokenizers" / (name == "gpt2" ? "gpt2.json" : "llama2.json"),
                        folder / "tokenizer.json");
  try {
    nn::Tokenizer::read(folder);
  } catch (const NotImplementedError&) {
    (void)skip_if(true, "tokenizers that need libpcre2 or libutf8proc were left out");
    return {};
  }
  return folder;
}

std::string written(const tools::WriteOptions& options) {
  std::string text;
  tools::write_texts(options, posix_file_system(), [&](std::string_view piece) { text += piece; });
  return text;
}

/// Whether each piece is whole characters.
bool in_whole_characters(const tools::WriteOptions& options) {
  bool whole = true;
  tools::write_texts(options, posix_file_system(), [&](std::string_view piece) {
    const nlohmann::json text = std::string(piece);
    whole &= text.dump(-1, ' ', false, nlohmann::json::error_handler_t::ignore) ==
             text.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  });
  return whole;
}

}  // namespace

TEST_CASE("sherd generate writes what the library generates, behind each prompt its own") {
  const TempDirectory root;
  for (const std::string name : {"gpt2", "llama"}) {
    const std::optional<Path> folder = model_folder(root, name);
    if (!folder) continue;
    const nn::Tokenizer tokenizer = nn::Tokenizer::read(*folder);
    const std::vector<std::string> prompts = {"The License", "You", "A\tline\nand the next"};
    std::vector<Tokens> ids;
    for (const std::string& prompt : prompts) ids.push_back(tokenizer.encode(prompt));
    const auto expected = [&](const auto& model, const tools::WriteOptions& o) {
      const nn::GenerateOptions options{.max_new_tokens = o.tokens,
                                        .temperature = o.temperature,
                                        .top_k = o.top_k,
                                        .top_p = o.top_p,
                                        .stop_tokens = nn::end_tokens(*folder),
                                        .seed = o.seed};
      const std::vector<Tokens> found = nn::generate(model, ids, options);
      std::string text;
      for (std::size_t row = 0; row < ids.size(); ++row) {
        nn::DecodeStream stream(tokenizer);
        for (const std::int64_t token : ids[row]) stream.step(token);
        text += prompts[row];
        for (const std::int64_t token : found[row])
          if (std::ranges::count(options.stop_tokens, token) == 0) text += stream.step(token);
        text += stream.finish() + "\n";
      }
      return text;
    };
    for (tools::WriteOptions o : {tools::WriteOptions{.tokens = 30, .seed = 2},
                                  {.tokens = 90, .temperature = 3, .top_k = 30, .top_p = 0.9, .seed = 5},
                                  {.tokens = 12, .temperature = 0}}) {
      o.model.folder = folder->string(), o.prompts = prompts;
      std::string right;
      if (name == "gpt2") {
        nn::Gpt model = nn::load_gpt(*folder);
        model.eval();
        right = expected(model, o);
      } else {
        nn::Llama model = nn::load_llama(*folder);
        model.eval();
        right = expected(model, o);
      }
      CHECK(written(o) == right);
      CHECK(in_whole_characters(o));
    }
  }
}

TEST_CASE("sherd generate ends a text before a stop text, and where the model's own token for that comes") {
  const TempDirectory root;
  const std::optional<Path> folder = model_folder(root, "llama");
  if (!folder) return;
  tools::WriteOptions o{.tokens = 40, .temperature = 2, .seed = 4};
  o.model.folder = folder->string(), o.prompts = {"The License"};
  const std::string whole = written(o);
  const std::size_t begin = o.prompts[0].size();
  for (std::size_t at = begin + 1; at + 4 < whole.size(); at += 3) {
    // Whole characters of it.
    const auto starts = [&](std::size_t i) { return (static_cast<unsigned char>(whole[i]) & 0xc0) != 0x80; };
    std::size_t first = at, end = at + 3;
    while (!starts(first)) --first;
    while (end < whole.size() && !starts(end)) ++end;
    o.stop = {"not there", whole.substr(first, end - first)};
    if (o.stop[1].find('\n') != std::string::npos) continue;
    INFO(o.stop[1]);
    CHECK(written(o) == whole.substr(0, whole.find(o.stop[1], begin)) + "\n");
  }
}

TEST_CASE(
    "a special token has no text and stops sherd generate nevertheless; the spelling of another is none") {
  const TempDirectory root;
  for (const std::string name : {"llama", "gpt2"}) {
    INFO(name);
    const std::optional<Path> folder = model_folder(root, name);
    if (!folder) continue;
    tools::WriteOptions o{.tokens = 40, .temperature = 2, .seed = 4};
    o.model.folder = folder->string(), o.prompts = {"The License"};
    const std::string whole = written(o);
    const nn::Tokenizer tokenizer = nn::Tokenizer::read(*folder);
    const nn::GenerateOptions options{
        .max_new_tokens = 40, .temperature = 2, .stop_tokens = nn::end_tokens(*folder), .seed = 4};
    const std::vector<Tokens> prompts = {tokenizer.encode(o.prompts[0])};
    const auto found = std::visit(
        [&](auto model) {
          model.eval();
          return nn::generate(model, prompts, options);
        },
        nn::load_gpt_or_llama(*folder))[0];
    // One whose spelling (with a mark for a space) is not in the text.
    const auto spelt = std::ranges::find_if(found, [&](std::int64_t token) {
      const std::string spelling = tokenizer.id_to_token(token);
      return !tokenizer.is_special(token) && whole.find(spelling) == std::string::npos;
    });
    REQUIRE(spelt != found.end());
    o.stop = {tokenizer.id_to_token(*spelt)};
    CHECK(written(o) == whole);
    // The same token as a special one.
    const Path file = *folder / "tokenizer.json";
    nlohmann::json changed = nlohmann::json::parse(posix_file_system().read(file));
    changed["added_tokens"].push_back({{"id", *spelt},
                                       {"content", o.stop[0]},
                                       {"single_word", false},
                                       {"lstrip", false},
                                       {"rstrip", false},
                                       {"normalized", false},
                                       {"special", true}});
    std::ofstream(file) << changed;
    REQUIRE(nn::Tokenizer::read(*folder).is_special(*spelt));
    CHECK(written(o).size() < whole.size());
    CHECK(whole.starts_with(written(o).substr(0, o.prompts[0].size())));
  }
}

TEST_CASE("sherd generate writes the best beam") {
  const TempDirectory root;
  const std::optional<Path> folder = model_folder(root, "llama");
  if (!folder) return;
  const nn::Tokenizer tokenizer = nn::Tokenizer::read(*folder);
  nn::Llama model = nn::load_llama(*folder);
  model.eval();
  tools::WriteOptions o{.tokens = 12, .beams = 3};
  o.model.folder = folder->string(), o.prompts = {"The License", "You"};
  std::string right;
  for (const std::string& prompt : o.prompts) {
    Tokens all = tokenizer.encode(prompt);
    const std::size_t before = tokenizer.decode(all).size();
    const Tokens best =
        nn::beam_search(model, std::span(&all, 1),
                        {.beams = 3, .max_new_tokens = 12, .stop_tokens = nn::end_tokens(*folder)})
            .at(0)
            .at(0)
            .tokens;
    for (const std::int64_t token : best)
      if (std::ranges::count(nn::end_tokens(*folder), token) == 0) all.push_back(token);
    right += prompt + tokenizer.decode(all).substr(before) + "\n";
  }
  CHECK(written(o) == right);
}

TEST_CASE("sherd evaluate prints transformers' perplexity, and files are texts of their own") {
  const TempDirectory root;
  const auto expected = nlohmann::json::parse(posix_file_system().read(goldens / "generation/expected.json"));
  const auto number = [](const std::string& line, const std::string& key) {
    const std::size_t at = line.find(key + "=");
    REQUIRE(at != std::string::npos);
    return std::stod(line.substr(at + key.size() + 1));
  };
  const std::string license = (Path(source_root) / "LICENSE").string();
  for (const std::string name : {"gpt2", "llama"}) {
    const std::optional<Path> folder = model_folder(root, name);
    if (!folder) continue;
    for (const auto& one : expected.at("perplexity").at(name)) {
      const auto line = [&](std::vector<std::string> data) {
        return tools::predict({.model = {.folder = folder->string()},
                               .data = std::move(data),
                               .context = one.at("context"),
                               .stride = one.at("stride")},
                              posix_file_system());
      };
      const std::string once = line({license}), twice = line({license, license});
      const double value = std::exp(one.at("nats").get<double>() / one.at("tokens").get<double>());
      CHECK(std::abs(number(once, "perplexity") - value) < 1e-4 * value);
      CHECK(number(twice, "tokens") == 2 * number(once, "tokens"));
      CHECK(number(twice, "perplexity") == number(once, "perplexity"));
    }
  }
}

TEST_CASE("sherd generate and sherd evaluate say in one line what is wrong") {
  const TempDirectory root;
  const std::optional<Path> folder = model_folder(root, "llama");
  if (!folder) return;
  for (const char* name : {"no_config", "no_weights", "no_tokenizer", "no_json"})
    std::filesystem::copy(*folder, root / name);
  std::filesystem::remove(root / "no_config" / "config.json");
  std::filesystem::remove(root / "no_weights" / "model.safetensors");
  std::filesystem::remove(root / "no_tokenizer" / "tokenizer.json");
  std::ofstream(root / "no_json" / "config.json") << "{";
  std::ofstream(root / "one") << "a";
  std::ofstream(root / "nothing");
  const std::pair<Arguments, std::string> lines[] = {
      {{"generate", "llama"}, "--prompt is required"},
      {{"generate", "--prompt", "a"}, "FOLDER is required"},
      {{"generate", "nowhere", "--prompt", "a"}, "'nowhere' is no folder"},
      {{"generate", "no_config", "--prompt", "a"}, "'no_config' has no config.json"},
      {{"generate", "no_weights", "--prompt", "a"}, "no_weights"},
      {{"generate", "no_tokenizer", "--prompt", "a"}, "no tokenizer.json and no tokenizer.model"},
      {{"generate", "no_json", "--prompt", "a"}, "config.json"},
      {{"generate", "llama", "--prompt", "a", "--tokens", "0"}, "--tokens 0"},
      {{"generate", "llama", "--prompt", "a", "--temperature", "-1"}, "--temperature -1"},
      {{"generate", "llama", "--prompt", "a", "--top-k", "-1"}, "--top-k -1"},
      {{"generate", "llama", "--prompt", "a", "--top-p", "0"}, "--top-p 0"},
      {{"generate", "llama", "--prompt", "a", "--beams", "0"}, "--beams 0"},
      {{"generate", "llama", "--prompt", "a", "--beams", "2", "--top-k", "3"}, "beams draw nothing"},
      {{"generate", "llama", "--prompt", "a", "--beams", "2", "--top-p", "0.5"}, "beams draw nothing"},
      {{"generate", "llama", "--prompt", "a", "--beams", "2", "--temperature", "0.5"}, "beams draw nothing"},
      {{"generate", "llama", "--prompt", "a", "--beams", "2", "--seed", "5"}, "beams draw nothing"},
      {{"generate", "llama", "--prompt", "a", "--tokens", "1073741825"}, "--tokens 1073741825"},
      {{"generate", "llama", "--prompt", "a", "--beams", "2", "--tokens", "90"}, "beyond the context of 64"},
      {{"generate", "llama", "--prompt", "a", "--stop", ""}, "--stop"},
      {{"generate", "llama", "--prompt", "a", "--stop", "\x80"}, "UTF-8"},
      {{"generate", "llama", "--prompt", "a", "--dtype", "f8"}, "--dtype f8"},
      {{"generate", "llama", "--prompt", "a", "--device", "tpu"}, "--device tpu"},
      {{"evaluate", "llama"}, "--data is required"},
      {{"evaluate", "llama", "--data", "nofile"}, "nofile"},
      {{"evaluate", "llama", "--data", "."}, "is a folder"},
      {{"evaluate", "llama", "--data", "one", "--context", "65"}, "context 65"},
      {{"evaluate", "llama", "--data", "one", "--context", "8", "--stride", "9"}, "stride 9"},
      {{"evaluate", "llama", "--data", "nothing"}, "nothing to predict"},
  };
  for (const auto& [words, why] : lines) {
    Command run(root, words);
    CHECK(run.wait() == 1);
    const std::string err = run.err();
    INFO(err);
    CHECK(err.starts_with("sherd: "));
    CHECK(std::ranges::count(err, '\n') == 1);
    CHECK_THAT(err, ContainsSubstring(why));
    CHECK(run.out().empty());
  }
  Command run(root, {"generate", "llama", "--prompt", "The License", "--prompt", "You", "--tokens", "5",
                     "--seed", "3"});
  CHECK(run.wait() == 0);
  tools::WriteOptions o{.prompts = {"The License", "You"}, .tokens = 5, .seed = 3};
  o.model.folder = folder->string();
  CHECK(run.out() == written(o));
  Command evaluate(root, {"evaluate", "llama", "--data", "no_json/tokenizer.json"});
  CHECK(evaluate.wait() == 0);
  CHECK(evaluate.out().starts_with("tokens="));
}
