// Tokenizers: what PyPI's `tokenizers` and `sentencepiece` answer, and what must hold beside that.
#include "nn/tokenizer.h"

#include <map>
#include <thread>

#include "runtime/error.h"
#include "tests/catch.h"
#include "tests/nn/tokenizer_goldens.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;
using nlohmann::json;

namespace {

/// The tokenizers that this build can read; where it cannot read all, the case counts as skipped.
std::vector<std::string> supported(const std::vector<std::string>& names) {
  std::vector<std::string> found;
  for (const std::string& name : names) {
    if (is_supported(name))
      found.push_back(name);
    else
      (void)skip_if(true, "tokenizers that need libpcre2 or libutf8proc were left out");
  }
  return found;
}

const EncodeOptions alone{.add_special_tokens = false};
const DecodeOptions all_of_it{.skip_special_tokens = false};

std::string streamed(const Tokenizer& tokenizer, const Ids& ids, const DecodeOptions& options) {
  DecodeStream stream(tokenizer, options);
  std::string text;
  for (const std::int64_t id : ids) text += stream.step(id);
  return text + stream.finish();
}

bool is_sound(const std::string& text) {
  return json(text).dump(-1, ' ', false, json::error_handler_t::ignore) ==
         json(text).dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace

TEST_CASE("tokens and texts are those of PyPI's tokenizers and sentencepiece", "[one thread]") {
  const json& answers = golden_answers();
  for (const std::string& name : supported(tokenizer_names())) {
    INFO(name);
    const Tokenizer tokenizer = golden_tokenizer(name);
    const json& golden = answers.at(name);
    CHECK(tokenizer.vocab_size() == golden.at("size").get<std::int64_t>());
    for (std::size_t i = 0; i < answers.at("texts").size(); ++i) {
      const auto text = answers.at("texts")[i].get<std::string>();
      const Ids ids = golden.at("ids")[i];
      INFO("'" << text << "'");
      CHECK(tokenizer.encode(text, alone) == ids);
      Ids around = golden.at("around")[0];
      around.insert(around.end(), ids.begin(), ids.end());
      for (const auto& id : golden.at("around")[1]) around.push_back(id);
      CHECK(tokenizer.encode(text) == around);
      CHECK(tokenizer.decode(ids, all_of_it) == golden.at("decoded")[i].get<std::string>());
      CHECK(streamed(tokenizer, ids, all_of_it) == golden.at("decoded")[i].get<std::string>());
    }
    for (std::size_t i = 0; i < golden.at("random").size(); ++i) {
      const Ids ids = golden.at("random")[i];
      CHECK(tokenizer.decode(ids, all_of_it) == golden.at("random_decoded")[i].get<std::string>());
      CHECK(tokenizer.decode(ids) == golden.at("random_plain")[i].get<std::string>());
    }
  }
}

TEST_CASE("a tokenizer that this build cannot read is an error that names the library", "[one thread]") {
  for (const std::string& name : tokenizer_names()) {
    INFO(name);
    if (is_supported(name)) {
      CHECK_NOTHROW(golden_tokenizer(name));
      continue;
    }
    const auto message = message_of<NotImplementedError>([&] { golden_tokenizer(name); });
    CHECK(message.find(name) != std::string::npos);
    CHECK((message.find("install libpcre2-dev") != std::string::npos ||
           message.find("install libutf8proc-dev") != std::string::npos));
  }
}

TEST_CASE("texts come back from byte-level tokens as they were", "[one thread]") {
  std::mt19937_64 draw(1);
  for (const std::string& name : supported({"gpt2.json", "llama3.json", "o200k.json"})) {
    const Tokenizer tokenizer = golden_tokenizer(name);
    for (int i = 0; i < 400; ++i) {
      const std::string text = random_text(draw, static_cast<int>(draw() % 60));
      INFO(name << ": " << json(text).dump(-1, ' ', true));
      CHECK(tokenizer.decode(tokenizer.encode(text, alone), all_of_it) == text);
    }
  }
}

TEST_CASE("texts come back from tokens with bytes for characters without one", "[one thread]") {
  std::mt19937_64 draw(2);
  for (const char* name : {"gemma.json", "gemma.model", "llama2.json", "llama2.model"}) {
    const Tokenizer tokenizer = golden_tokenizer(name);
    for (int i = 0; i < 400; ++i) {
      const std::string text = "a" + random_text(draw, static_cast<int>(draw() % 60));
      INFO(name << ": " << json(text).dump(-1, ' ', true));
      CHECK(tokenizer.decode(tokenizer.encode(text, alone), all_of_it) == text);
    }
  }
}

TEST_CASE("malformed bytes count as U+FFFD", "[one thread]") {
  // Unicode's table of what replaces what (chapter 3.9): as many bytes as may begin a character are one.
  const std::map<std::string, int> ends = {{"\xC0\xAF", 2},         {"\xE0\x9F\x80", 3}, {"\xED\xA0\x80", 3},
                                           {"\xF4\x91\x92\x93", 4}, {"\xFF", 1},         {"\xE1\x80", 1},
                                           {"\xF0\x91\x92", 1},     {"\xE2", 1},         {"\xC2", 1},
                                           {"\x80\xBF", 2},         {"\xF1\xBF", 1},     {"\xF8\x88", 2}};
  const std::string mark = "\xEF\xBF\xBD";
  for (const auto& [bytes, marks] : ends) {
    std::string each, as_one;
    for (std::size_t i = 0; i < bytes.size(); ++i) each += mark;
    for (int i = 0; i < marks; ++i) as_one += mark;
    for (const std::string& name : supported({"gpt2.json"})) {
      const Tokenizer tokenizer = golden_tokenizer(name);
      CHECK(tokenizer.encode("x" + bytes + "y") == tokenizer.encode("x" + as_one + "y"));
      CHECK(tokenizer.encode(bytes) == tokenizer.encode(as_one));
    }
    const Tokenizer llama = golden_tokenizer("llama2.json");
    CHECK(llama.encode(bytes + "y") == llama.encode(as_one + "y"));
    const Tokenizer pieces = golden_tokenizer("llama2.model");  // as sentencepiece, each byte
    CHECK(pieces.encode("x" + bytes + "y") == pieces.encode("x" + each + "y"));
  }
}

TEST_CASE("words of any length are merged as one rule after the other merges them", "[one thread]") {
  if (skip_if(!has_pcre2, "this build has no libpcre2")) return;
  const Tokenizer tokenizer = golden_tokenizer("gpt2.json");
  const json model = golden_json("gpt2.json").at("model");
  std::map<std::pair<std::string, std::string>, std::size_t> ranks;
  for (const auto& merge : model.at("merges")) ranks.emplace(std::pair{merge[0], merge[1]}, ranks.size());
  const auto merged = [&](const std::string& word) {
    std::vector<std::string> parts;
    for (const char c : word) parts.emplace_back(1, c);
    while (true) {
      std::size_t best = ranks.size(), place = 0;
      for (std::size_t i = 0; i + 1 < parts.size(); ++i)
        if (const auto found = ranks.find({parts[i], parts[i + 1]});
            found != ranks.end() && found->second < best) {
          best = found->second;
          place = i;
        }
      if (best == ranks.size()) break;
      parts[place] += parts[place + 1];
      parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(place) + 1);
    }
    Ids ids;
    for (const std::string& part : parts) ids.push_back(model.at("vocab").at(part).get<std::int64_t>());
    return ids;
  };
  std::mt19937_64 draw(3);
  const std::string letters = "etaoinshrdlu";
  std::size_t longest = 0;
  for (int i = 0; i < 300; ++i) {
    std::string word;
    for (std::uint64_t n = 1 + draw() % (i % 10 == 0 ? 400 : 45); n > 0; --n)
      word += letters[draw() % letters.size()];
    INFO(word);
    const Ids expected = merged(word);
    CHECK(tokenizer.encode(word) == expected);
    CHECK(tokenizer.encode(word) == expected);  // now from the cache
    longest = std::max(longest, word.size());
  }
  CHECK(longest > 200);
}

TEST_CASE("a word of a million characters takes no square of time", "[one thread]") {
  const std::string text(1'000'000, 'a');
  for (const std::string& name :
       supported({"gpt2.json", "llama2.json", "llama2.model", "metaspace_first.json"})) {
    INFO(name);
    const Tokenizer tokenizer = golden_tokenizer(name);
    CHECK(tokenizer.decode(tokenizer.encode(text)) == text);
  }
}

TEST_CASE("white space and tokens that take it along take no square of time", "[one thread]") {
  json content = golden_json("llama2.json");
  for (json& token : content["added_tokens"])
    if (token["content"] == "<L>") token["content"] = "\n", token["normalized"] = false;
  const Tokenizer tokenizer = tokenizer_of(content.dump());
  const Ids ids = tokenizer.encode(std::string(300'000, '\n'), alone);
  CHECK(ids.size() >= 300'000);
  CHECK(std::ranges::count(ids, tokenizer.token_to_id("\n").value()) == 300'000);
}

TEST_CASE("a text of 2 GiB and more is refused", "[one thread]") {
  const Tokenizer tokenizer = golden_tokenizer("llama2.model");
  const std::string text = "a";
  CHECK(message_of<ValueError>([&] {
          (void)tokenizer.encode({text.data(), std::size_t{1} << 31});
        }).find("encode less than 2147483648 at a time") != std::string::npos);
}

TEST_CASE("threads share a tokenizer") {
  const json& texts = golden_answers().at("texts");
  for (const std::string& name : supported({"llama3.json", "llama2.model"})) {
    const Tokenizer tokenizer = golden_tokenizer(name);
    const json& golden = golden_answers().at(name).at("ids");
    std::vector<std::thread> threads;
    std::vector<int> wrong(6);
    for (int& count : wrong)
      threads.emplace_back([&, mine = tokenizer] {
        for (int round = 0; round < 20; ++round)
          for (std::size_t i = 0; i < texts.size(); ++i)
            count +=
                mine.encode(texts[i].get_ref<const std::string&>(), alone) != golden[i].get<Ids>() ? 1 : 0;
      });
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == std::vector<int>(6));
  }
}

TEST_CASE("a stream gives whole characters, and together what decode gives", "[one thread]") {
  std::mt19937_64 draw(4);
  for (const std::string& name : supported(tokenizer_names())) {
    INFO(name);
    const Tokenizer tokenizer = golden_tokenizer(name);
    DecodeStream stream(tokenizer, all_of_it);
    const auto in_parts = [&](const Ids& ids) {
      std::string text;
      for (const std::int64_t id : ids) {
        const std::string part = stream.step(id);
        CHECK(is_sound(part));
        text += part;
      }
      return text + stream.finish();
    };
    for (int i = 0; i < 100; ++i) {
      const Ids ids = tokenizer.encode(random_text(draw, 20));
      CHECK(in_parts(ids) == tokenizer.decode(ids, all_of_it));
      Ids any;  // tokens in an order that no text has
      for (int n = 0; n < 20; ++n)
        any.push_back(
            static_cast<std::int64_t>(draw() % static_cast<std::uint64_t>(tokenizer.vocab_size() + 3)));
      const std::string text = in_parts(any), whole = tokenizer.decode(any, all_of_it);
      CHECK(is_sound(text));
      // Where a run of bytes is malformed `tokenizers` loses what was sound before.
      const bool loses = (name == "llama2.json" || name == "gemma.json" || name == "metaspace_first.json") &&
                         whole.find("\xEF\xBF\xBD") != std::string::npos;
      if (!loses) CHECK(text == whole);
    }
  }
}

TEST_CASE("a character of several tokens comes with its last", "[one thread]") {
  const Tokenizer tokenizer = golden_tokenizer("llama2.model");
  const std::string face = "\xF0\x9F\x98\x8E";
  const Ids ids = tokenizer.encode("a" + face, alone);
  REQUIRE(ids.size() >= 5);
  DecodeStream stream(tokenizer);
  std::vector<std::string> parts;
  for (const std::int64_t id : ids) parts.push_back(stream.step(id));
  const std::vector<std::string> last(parts.end() - 5, parts.end());
  CHECK(last == std::vector<std::string>{"a", "", "", "", face});
  CHECK(stream.finish().empty());
  CHECK(stream.step(ids[ids.size() - 4]).empty());
  CHECK(stream.finish() == "\xEF\xBF\xBD");
}

TEST_CASE("text that spells a special token is that token, or text as any other", "[one thread]") {
  if (skip_if(!has_pcre2, "this build has no libpcre2")) return;
  const Tokenizer tokenizer = golden_tokenizer("gpt2.json");
  const std::int64_t end = tokenizer.token_to_id("<|endoftext|>").value();
  CHECK(tokenizer.encode("<|endoftext|>") == Ids{end});
  const Ids spelled = tokenizer.encode("<|endoftext|>", {.special_tokens_in_text = false});
  CHECK(spelled.size() > 1);
  CHECK(std::ranges::count(spelled, end) == 0);
  CHECK(tokenizer.decode(spelled) == "<|endoftext|>");
  CHECK(tokenizer.decode(Ids{end}).empty());
  CHECK(tokenizer.decode(Ids{end}, all_of_it) == "<|endoftext|>");
}

TEST_CASE("tokens are found by name and number", "[one thread]") {
  for (const std::string& name : supported(tokenizer_names())) {
    const Tokenizer tokenizer = golden_tokenizer(name);
    for (std::int64_t id = 0; id < tokenizer.vocab_size(); ++id)
      CHECK(tokenizer.token_to_id(tokenizer.id_to_token(id)) == id);
    CHECK_FALSE(tokenizer.token_to_id("no such token").has_value());
    for (const std::int64_t id : {std::int64_t{-1}, tokenizer.vocab_size(), std::int64_t{1} << 40}) {
      CHECK(message_of<ValueError>([&] { tokenizer.id_to_token(id); }).find("no token has the number") !=
            std::string::npos);
      CHECK(tokenizer.decode(Ids{id}).empty());
    }
  }
}

TEST_CASE("a folder's files say which tokens begin and end a text", "[one thread]") {
  const TempDirectory root;
  const auto write = [&](const char* name, std::string_view text) {
    if (posix_file_system().exists(root / name)) posix_file_system().remove(root / name);
    posix_file_system().create(root / name)->write(text);
  };
  CHECK(message_of<FileError>([&] {
          Tokenizer::read(root.path());
        }).find("has no tokenizer.json and no tokenizer.model") != std::string::npos);
  CHECK_THROWS_AS(Tokenizer::read(root / "nothing"), FileError);

  write("tokenizer.model", text_of_file(tokenizer_file("llama2.model")));
  const Tokenizer plain = Tokenizer::read(root.path());
  CHECK(plain.bos_token_id() == 1);
  CHECK(plain.eos_token_id() == 2);
  const Ids text = plain.encode("the fox", alone);
  CHECK(plain.encode("the fox").front() == 1);
  CHECK(plain.encode("the fox").size() == text.size() + 1);
  write("tokenizer_config.json",
        R"({"add_bos_token": false, "add_eos_token": true, "eos_token": {"content": "</s>"}})");
  const Ids ended = Tokenizer::read(root.path()).encode("the fox");
  CHECK(ended.front() == text.front());
  CHECK(ended.back() == 2);

  write("tokenizer.json", text_of_file(tokenizer_file("llama2.json")));  // goes before tokenizer.model
  write("tokenizer_config.json", R"({"bos_token": "<s>", "eos_token": null})");
  write("special_tokens_map.json", R"({"eos_token": "</s>", "bos_token": "nothing"})");
  const Tokenizer json_one = Tokenizer::read(root.path());
  CHECK(json_one.token_to_id("[MASK]").has_value());
  CHECK(json_one.bos_token_id() == 1);
  CHECK(json_one.eos_token_id() == 2);
  CHECK_FALSE(golden_tokenizer("llama2.json").bos_token_id().has_value());
}
