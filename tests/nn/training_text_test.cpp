// Files as tokens to tune on, and tuning by them as PyTorch and PEFT do it. The folder tests/golden/tuning is
// made by make_tuning.py.
#include "nn/training_text.h"

#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "collectives/world.h"
#include "nn/lora.h"
#include "nn/optimizer.h"
#include "nn/pretrained.h"
#include "nn/schedules.h"
#include "runtime/ops.h"
#include "shard/fully_shard.h"
#include "tests/counting_file_system.h"
#include "tests/message_of.h"
#include "tests/ranks.h"
#include "tests/source_root.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;
using nlohmann::json;
using Path = FileSystem::Path;

namespace {

const Path goldens = Path(source_root) / "tests/golden/tuning";

const Tokenizer& tokenizer() {
  static const Tokenizer read = Tokenizer::read(goldens / "llama");
  return read;
}
void write(const Path& path, std::string_view content) { std::ofstream(path, std::ios::binary) << content; }

/// The texts of documents, without the token that ends each.
std::vector<std::string> texts_of(const TokenizedText& text) {
  std::vector<std::string> texts;
  for (std::size_t d = 0, begin = 0; d < text.ends.size(); ++d) {
    const auto end = static_cast<std::size_t>(text.ends[d]);
    const std::vector<std::int64_t> ids(text.tokens.begin() + static_cast<std::ptrdiff_t>(begin),
                                        text.tokens.begin() + static_cast<std::ptrdiff_t>(end));
    CHECK(ids.back() == tokenizer().eos_token_id());
    texts.push_back(tokenizer().decode(std::span(ids).first(ids.size() - 1)));
    begin = end;
  }
  return texts;
}

/// The given part of a document.
std::string prompt_of(const TokenizedText& text, std::size_t d) {
  const std::int64_t begin = d == 0 ? 0 : text.ends[d - 1];
  const std::vector<std::int64_t> ids(text.tokens.begin() + begin,
                                      text.tokens.begin() + begin + text.prompts[d]);
  return tokenizer().decode(ids);
}

json expected() { return json::parse(posix_file_system().read(goldens / "expected.json")); }

}  // namespace

TEST_CASE(
    "training text: a file of text is cut before its last tenth, and a file of lines after nine of ten") {
  const TempDirectory folder;
  std::string lines, text;
  for (int i = 0; i < 25; ++i) lines += json{{"text", fmt::format("line {}", i)}, {"id", i}}.dump() + "\n";
  for (int i = 0; i < 40; ++i) text += "Größe ";
  write(folder / "a.txt", text);
  write(folder / "b.jsonl", "\xEF\xBB\xBF" + lines + " \t\r\n\n");
  const TrainingText read =
      read_training_text({(folder / "a.txt").string(), (folder / "b.jsonl").string()}, tokenizer());
  CHECK(read.files == 2);
  const std::vector<std::string> train = texts_of(read.train), validation = texts_of(read.validation);
  REQUIRE(train.size() == 1 + 23);
  REQUIRE(validation.size() == 1 + 2);
  CHECK(train[0] + validation[0] == text);
  CHECK(train[0].size() <= text.size() * 9 / 10);
  CHECK(train[0].size() + 4 > text.size() * 9 / 10);
  CHECK(train[1] == "line 0");
  CHECK(train[23] == "line 22");
  CHECK(validation[2] == "line 24");

  std::filesystem::create_directories(folder / "in/below");
  write(folder / "in/z.txt", "the last");
  write(folder / "in/below/a.jsonl", R"({"text": "the first"})");
  write(folder / "in/.hidden", "not at all");
  write(folder / "in/binary", std::string_view("a\0b", 3));
  write(folder / "in/empty", "");
  const TrainingText below = read_training_text({(folder / "in").string()}, tokenizer());
  CHECK(below.files == 2);
  CHECK(texts_of(below.train) == std::vector<std::string>{"the first", "the las"});
  CHECK(texts_of(below.validation) == std::vector<std::string>{"t"});
}

TEST_CASE("training text: of a prompt and its completion the second is learnt, tokens over the border too") {
  const TempDirectory folder;
  std::string lines;
  const std::vector<std::pair<std::string, std::string>> pairs = {
      {"What is a leaf?", " It decides."}, {"2 + 2 =", " 4"}, {"the", "re is more"}, {"Grüße, ", "世界"}};
  for (const auto& [prompt, completion] : pairs)
    lines += json{{"prompt", prompt}, {"completion", completion}}.dump() + "\n";
  write(folder / "pairs.jsonl", lines);
  const TrainingText read = read_training_text({(folder / "pairs.jsonl").string()}, tokenizer());
  const std::vector<std::string> train = texts_of(read.train), validation = texts_of(read.validation);
  REQUIRE(train.size() == 3);
  REQUIRE(validation.size() == 1);  // the last of all, since a tenth is none
  for (std::size_t d = 0; d < 3; ++d) {
    const auto& [prompt, completion] = pairs[d];
    CHECK(train[d] == prompt + completion);
    // Whole, but where the tokenizer joins its end with what follows.
    CHECK(prompt.starts_with(prompt_of(read.train, d)));
    CHECK(tokenizer().encode(prompt).size() - static_cast<std::size_t>(read.train.prompts[d]) <= 1);
  }
  CHECK(validation[0] == "Grüße, 世界");
  CHECK(prompt_of(read.validation, 0) == "Grüße, ");
}

TEST_CASE("training text: a bad line or file is one line of an error that names it") {
  const TempDirectory folder;
  const std::string good = R"({"text": "good"})"
                           "\n";
  const std::string deep = "{\"text\":\"a\",\"x\":" + std::string(100000, '[');
  const std::pair<std::string, std::string> bad[] = {
      {R"({"text": "cut)", "is no JSON from its byte 14 on"},
      {R"({"text": "two"} {"text": "objects"})", "is no JSON"},
      {"{\"text\": \"\xC3\x28\"}", "is no JSON"},
      {R"(["text"])", "is array, a line is an object"},
      {"7", "is number, a line is an object"},
      {R"({"text": 7})", "its text is number, it takes a string"},
      {R"({"text": null})", "its text is null"},
      {R"({"text": ["a", {"b": 1}]})", "its text is array"},
      {R"({"text": ""})", "its text is empty"},
      {R"({"prompt": "a", "completion": ""})", "its completion is empty"},
      {R"({"prompt": "a"})", "has the keys (prompt); it takes text, or prompt and completion"},
      {R"({"completion": "a"})", "has the keys (completion)"},
      {R"({"messages": []})", "has the keys (messages)"},
      {R"({"text": "a", "prompt": "b", "completion": "c"})", "has the keys (completion, prompt, text)"},
      {"{}", "has the keys ()"},
      {"{\"a\\nb\\u001b\": 1}", "has the keys (a?b?)"},
      {deep, "is nested deeper than 64 levels"},
      {R"({"text": "a", "n": 1e999})", "has a number that is too large for f64"},
      {"-1e400", "has a number that is too large for f64"},
      {std::string((1 << 24) + 1, ' '), "has more than 16777216 bytes"}};
  for (const auto& [line, why] : bad) {
    write(folder / "bad.jsonl", good + "\n" + good + line + "\n" + good);
    const std::string message =
        message_of<ValueError>([&] { read_training_text({(folder / "bad.jsonl").string()}, tokenizer()); });
    INFO(line.substr(0, 60) << ": " << message);
    CHECK_THAT(message, ContainsSubstring((folder / "bad.jsonl").string() + "': line 4: " + why));
    CHECK(message.find('\n') == std::string::npos);
  }
  const auto refuses = [&](const std::string& name, std::string_view content, const std::string& why) {
    write(folder / name, content);
    CHECK_THAT(message_of<ValueError>([&] { read_training_text({(folder / name).string()}, tokenizer()); }),
               ContainsSubstring(why));
  };
  refuses("empty.txt", "", "is empty");
  refuses("empty.jsonl", "\n \n", "has no line with a document");
  refuses("one.jsonl", good, "makes one document");
  refuses("one.txt", "x", "makes one document");
  std::filesystem::create_directory(folder / "nothing");
  CHECK_THAT(
      message_of<ValueError>([&] { read_training_text({(folder / "nothing").string()}, tokenizer()); }),
      ContainsSubstring("holds no text file"));
  CHECK_THAT(message_of<ValueError>([&] { read_training_text(std::span<const std::string>(), tokenizer()); }),
             ContainsSubstring("no file is named"));
  CHECK_THAT(message_of<FileError>([&] { read_training_text({(folder / "gone").string()}, tokenizer()); }),
             ContainsSubstring("gone': No such file"));
}

TEST_CASE("training text: whatever lines hold, they are read or named") {
  const TempDirectory folder;
  const std::string seeds[] = {R"({"text": "some text", "n": [1, {"a": null}]})",
                               R"({"prompt": "What?", "completion": "That."})",
                               R"({"text":"\u00e9\ud83d\ude00"})"};
  std::mt19937 random(7);
  const auto below = [&](std::size_t n) { return random() % n; };
  int read = 0, refused = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string lines;
    for (int i = 0; i < 3; ++i) {
      std::string line = seeds[below(3)];
      for (std::size_t changes = below(4); changes > 0; --changes) {
        const std::size_t at = below(line.size());
        const auto byte = static_cast<char>(random());
        if (below(3) == 0)
          line.erase(at, 1 + below(4));
        else if (below(2) == 0)
          line.insert(at, 1, below(2) == 0 ? "{}[]\",:\\\n"[below(9)] : byte);
        else
          line[at] = byte;
        if (line.empty()) line = " ";
      }
      lines += line + "\n";
    }
    write(folder / "lines.jsonl", lines);
    try {
      const TrainingText text = read_training_text({(folder / "lines.jsonl").string()}, tokenizer());
      CHECK_NOTHROW(text.train.check());
      CHECK_NOTHROW(text.validation.check());
      ++read;
    } catch (const ValueError& error) {
      const std::string_view message = error.what();
      CHECK(message.find("lines.jsonl': ") != message.npos);
      CHECK(message.find('\n') == message.npos);
      ++refused;
    }
  }
  CHECK(read > 50);
  CHECK(refused > 100);
}

TEST_CASE(
    "training text: a file of tokens is what was saved, or refused; its digest follows data and tokenizer") {
  const TempDirectory folder;
  const std::vector<std::string> data = {(goldens / "text.txt").string(), (goldens / "lines.jsonl").string()};
  const TrainingText text = read_training_text(data, tokenizer());
  const std::string digest = training_text_digest(data, goldens / "llama");
  const Path file = folder / "tokens.safetensors";
  save_training_text(text, digest, file);
  const TrainingText again = load_training_text(file, digest);
  for (const auto& [a, b] :
       {std::pair(&text.train, &again.train), std::pair(&text.validation, &again.validation)}) {
    CHECK(a->tokens == b->tokens);
    CHECK(a->ends == b->ends);
    CHECK(a->prompts == b->prompts);
  }
  CHECK(again.files == 2);
  CHECK_THAT(message_of<ValueError>([&] { load_training_text(file, "0123456789abcdef"); }),
             ContainsSubstring("of other data"));
  const std::string whole = posix_file_system().read(file);
  for (std::size_t at = 0; at < whole.size(); at += 1 + whole.size() / 97) {
    INFO("byte " << at);
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 4);
    write(file, changed);
    CHECK_THROWS_AS(load_training_text(file, digest), ValueError);
  }

  CHECK(training_text_digest(data, goldens / "llama") == digest);
  const std::vector<std::string> turned = {data[1], data[0]}, less = {data[0]};
  CHECK(training_text_digest(turned, goldens / "llama") != digest);
  CHECK(training_text_digest(less, goldens / "llama") != digest);
  std::filesystem::copy(goldens / "llama", folder / "model");
  CHECK(training_text_digest(data, folder / "model") == digest);
  write(folder / "model/tokenizer_config.json", "{}");
  CHECK(training_text_digest(data, folder / "model") != digest);
}

TEST_CASE("training text: a save of tokens that fails leaves the file that was there, or the new one") {
  const TempDirectory folder;
  TrainingText first, second;
  for (TrainingText* text : {&first, &second})
    for (TokenizedText* part : {&text->train, &text->validation})
      part->add(std::vector<std::int64_t>{1, text == &first ? 2 : 3});
  const Path file = folder / "tokens.safetensors";
  for (const Fault fault : all_faults)
    for (int at = 0;; ++at) {
      INFO(name_of(fault) << " at change " << at);
      save_training_text(first, "a", file);
      CountingFileSystem files(at, fault);
      try {
        save_training_text(second, "b", file, files);
      } catch (const FileError&) {
      }
      files.crash();
      int whole = 0;
      for (const char* digest : {"a", "b"}) try {
          load_training_text(file, digest);
          ++whole;
        } catch (const ValueError&) {
        }
      CHECK(whole == 1);
      if (!files.broke()) break;
    }
}

namespace {

/// The losses of a run over all of the data a step, each rank with a share of the documents.
struct Tuned {
  std::vector<double> losses;
  double validation = 0;
};

template <class Model>
Tuned tuned(Model& model, const TrainingText& text, const World* world, const json& settings) {
  const int ranks = world == nullptr ? 1 : world->size(), rank = world == nullptr ? 0 : world->rank();
  const PackingOptions rows{.context = settings["context"]};
  const Packing train(text.train, rows), validation(text.validation, rows);
  std::vector<Parameter> trained;
  for (const Parameter& p : model.parameters())
    if (p.requires_grad()) trained.push_back(p);
  AdamW adam(trained, {.weight_decay = 0});
  const std::int64_t steps = settings["steps"];
  const CosineSchedule schedule{settings["lr"], settings["min-lr"], settings["warmup"], steps};
  std::int64_t learnt = 0;
  std::vector<std::int64_t> mine;
  for (std::int64_t row = 0; row < train.rows(); ++row) {
    learnt += train.learnt(row);
    if (row % ranks == rank) mine.push_back(row);
  }
  Tuned result;
  for (std::int64_t step = 0; step < steps; ++step) {
    const PackedBatch batch = train.batch(mine);
    const Tensor loss = mul(packed_loss(model, batch, learnt), ranks);
    loss.backward();
    adam.set_lr(schedule(step));
    adam.step_clipped(shard::grad_norm(model.parameters()), 1);
    adam.zero_grad();
    result.losses.push_back(loss.item() / ranks);
  }
  std::vector<std::int64_t> all(static_cast<std::size_t>(validation.rows()));
  std::iota(all.begin(), all.end(), 0);
  const NoGrad guard;
  const PackedBatch batch = validation.batch(all);
  result.validation = packed_loss(model, batch, batch.learnt).item();
  return result;
}

template <class Make>
void check_tuned(const Make& make, const std::string& name, const std::string& file) {
  const json settings = expected(), golden = settings[name + " " + file];
  const TrainingText text = read_training_text({(goldens / file).string()}, tokenizer());
  CHECK(static_cast<std::int64_t>(text.train.tokens.size()) == golden["tokens"]);
  for (const int ranks : {1, 2, 4}) {
    INFO(name << ", " << file << ", " << ranks << " ranks");
    std::vector<Tuned> of_ranks(static_cast<std::size_t>(ranks));
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      auto model = make();
      shard::fully_shard(model);
      of_ranks[static_cast<std::size_t>(world.rank())] = tuned(model, text, &world, settings);
    }));
    for (std::size_t step = 0; step < golden["losses"].size(); ++step) {
      double loss = 0;
      for (const Tuned& t : of_ranks) loss += t.losses.at(step);
      CHECK(std::abs(loss - golden["losses"][step].get<double>()) < 2e-5);
    }
    for (const Tuned& t : of_ranks) CHECK(std::abs(t.validation - golden["validation"].get<double>()) < 2e-5);
  }
}

}  // namespace

TEST_CASE("tuning: losses of packed documents on 1, 2 and 4 ranks are those of PyTorch's plain loop") {
  for (const char* file : {"text.txt", "lines.jsonl"}) {
    check_tuned([] { return load_llama(goldens / "llama", f32); }, "llama", file);
    check_tuned([] { return load_gpt(goldens / "gpt2", f32); }, "gpt2", file);
  }
}

TEST_CASE("tuning: losses of adapters on 1, 2 and 4 ranks are those of PEFT's") {
  for (const char* file : {"text.txt", "lines.jsonl"})
    check_tuned(
        [] {
          Llama model = load_llama(goldens / "llama", f32);
          load_lora(model, goldens / "adapter");
          return model;
        },
        "adapter", file);
}
