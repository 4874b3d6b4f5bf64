// Tokenizers that are damaged, hostile or of a kind that is not supported.
#include <sys/resource.h>

#include <fstream>
#include <functional>

#include "runtime/error.h"
#include "tests/catch.h"
#include "tests/nn/tokenizer_goldens.h"
#include "tests/sanitizer.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;
using nlohmann::json;

namespace {

/// What reading a golden tokenizer.json says that was changed.
std::string changed(std::string_view name, const std::function<void(json&)>& change) {
  json content = golden_json(name);
  change(content);
  return refusal(content.dump());
}

/// Lets the process have no more than so many bytes beside those that it has; the sanitizers need theirs.
class MemoryLimit {
 public:
  explicit MemoryLimit(std::size_t more) {
    if (sanitized) return;
    ::getrlimit(RLIMIT_AS, &before_);
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit limit = before_;
    limit.rlim_cur = pages * 4096 + more;
    ::setrlimit(RLIMIT_AS, &limit);
  }
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;
  ~MemoryLimit() {
    if (!sanitized) ::setrlimit(RLIMIT_AS, &before_);
  }

 private:
  rlimit before_{};
};

/// A field of a protocol buffer's message.
std::string field(int number, std::string_view bytes) {
  std::string text;
  const auto varint = [&](std::uint64_t value) {
    for (; value >= 128; value >>= 7) text.push_back(static_cast<char>(value | 128));
    text.push_back(static_cast<char>(value));
  };
  varint(static_cast<std::uint64_t>(number) << 3 | 2);
  varint(bytes.size());
  return text + std::string(bytes);
}
std::string field(int number, std::uint64_t value) {
  std::string text;
  for (std::uint64_t v : {static_cast<std::uint64_t>(number) << 3, value}) {
    for (; v >= 128; v >>= 7) text.push_back(static_cast<char>(v | 128));
    text.push_back(static_cast<char>(v));
  }
  return text;
}
std::string piece(std::string_view text, int type = 1) {
  return field(1, field(1, text) + field(3, static_cast<std::uint64_t>(type)));
}
const std::string bpe = field(2, field(3, 2U));
const std::string unknown = piece("<unk>", 2);

std::string model_refusal(const std::string& model) { return refusal(model, "tokenizer.model"); }

}  // namespace

TEST_CASE("what a tokenizer.json has that is not supported is named", "[one thread]") {
  using Change = std::function<void(json&)>;
  const std::vector<std::pair<const char*, Change>> cases = {
      {"model.type is \"Unigram\"; supported: BPE", [](json& j) { j["model"]["type"] = "Unigram"; }},
      {"model.dropout is 0.1; supported: null, 0", [](json& j) { j["model"]["dropout"] = 0.1; }},
      {"model.end_of_word_suffix is \"</w>\"", [](json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }},
      {"model.unk_token: '<none>' is not in model.vocab",
       [](json& j) { j["model"]["unk_token"] = "<none>"; }},
      {"model.unk_token: a single character, which texts may have",
       [](json& j) { j["model"]["unk_token"] = "a"; }},
      {"truncation is {\"max_length\":5}; supported: null",
       [](json& j) { j["truncation"] = {{"max_length", 5}}; }},
      {"padding is", [](json& j) { j["padding"] = {{"length", 5}}; }},
      {"normalizer.type is \"Lowercase\"; supported: NFC",
       [](json& j) { j["normalizer"] = {{"type", "Lowercase"}}; }},
      {"normalizer.type is not there, or null", [](json& j) { j["normalizer"] = json::object(); }},
      {"normalizer is [1]; supported: an object", [](json& j) { j["normalizer"] = {1}; }},
      {"normalizer.normalizers[1].pattern is {\"Regex\":\" +\"}; supported: a String",
       [](json& j) { j["normalizer"]["normalizers"][1]["pattern"] = {{"Regex", " +"}}; }},
      {"pre_tokenizer.type is \"BertPreTokenizer\"; supported: ByteLevel, Split",
       [](json& j) { j["pre_tokenizer"] = {{"type", "BertPreTokenizer"}}; }},
      {"pre_tokenizer.behavior is \"Joined\"",
       [](json& j) {
         j["pre_tokenizer"] = {
             {"type", "Split"}, {"pattern", {{"String", " "}}}, {"behavior", "Joined"}, {"invert", false}};
       }},
      {"pre_tokenizer.prepend_scheme is \"often\"; supported: always, first, never",
       [](json& j) {
         j["pre_tokenizer"] = {{"type", "Metaspace"}, {"replacement", "_"}, {"prepend_scheme", "often"}};
       }},
      {"pre_tokenizer.replacement is \"__\"; supported: one character",
       [](json& j) { j["pre_tokenizer"] = {{"type", "Metaspace"}, {"replacement", "__"}}; }},
      {"decoder.decoders[0].type is \"WordPiece\"",
       [](json& j) { j["decoder"]["decoders"][0]["type"] = "WordPiece"; }},
      {"decoder.decoders[3]: Strip is supported once, after Fuse",
       [](json& j) {
         j["decoder"]["decoders"][2]["type"] = "ByteFallback";
         j["decoder"]["decoders"][1]["type"] = "Replace";
         j["decoder"]["decoders"][1]["pattern"] = {{"String", "x"}};
         j["decoder"]["decoders"][1]["content"] = "";
       }},
      {"decoder.decoders[3].stop is 2; supported: 0",
       [](json& j) { j["decoder"]["decoders"][3]["stop"] = 2; }},
      {"post_processor.type is \"BertProcessing\"; supported: TemplateProcessing",
       [](json& j) { j["post_processor"] = {{"type", "BertProcessing"}}; }},
      {"post_processor.single is []; supported: the text A, once",
       [](json& j) { j["post_processor"]["single"] = json::array(); }},
      {"normalizer.normalizers[1].content is \"xxxx",
       [](json& j) { j["normalizer"]["normalizers"][1]["content"] = std::string(65, 'x'); }},
      {"the normalizer makes more than",
       [](json& j) {
         j["normalizer"]["normalizers"] = json::array();
         for (int i = 0; i < 8; ++i)
           j["normalizer"]["normalizers"].push_back(
               {{"type", "Replace"}, {"pattern", {{"String", "L"}}}, {"content", std::string(64, 'L')}});
       }},
      {"the decoder makes more than",
       [](json& j) {
         j["decoder"]["decoders"] = json::array();
         for (int i = 0; i < 8; ++i)
           j["decoder"]["decoders"].push_back(
               {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", std::string(64, 'a')}});
       }},
      {"no token has this number",
       [](json& j) { j["post_processor"]["special_tokens"]["<s>"]["ids"] = {99999}; }},
      {"lacks '<s>'", [](json& j) { j["post_processor"]["special_tokens"] = json::object(); }},
      {"added_tokens[0].content is \"\"", [](json& j) { j["added_tokens"][0]["content"] = ""; }},
      {"added_tokens[0].id: is 7, but model.vocab", [](json& j) { j["added_tokens"][0]["id"] = 7; }},
      {"has the number 0 too", [](json& j) { j["added_tokens"][0]["content"] = "new"; }},
      {"added_tokens[0].special is 1; supported: true, false",
       [](json& j) { j["added_tokens"][0]["special"] = 1; }},
      {"is there twice", [](json& j) { j["added_tokens"].push_back(j["added_tokens"][0]); }},
      {"the token <0x0A> is not in model.vocab", [](json& j) { j["model"]["vocab"].erase("<0x0A>"); }},
      {"merges of the token '<0x41>' are not supported",
       [](json& j) {
         j["model"]["vocab"]["<0x41><0x41>"] = 9999;
         j["model"]["merges"].push_back({"<0x41>", "<0x41>"});
       }},
      {"has no model.merges", [](json& j) { j["model"].erase("merges"); }},
      {"has no model.vocab", [](json& j) { j.erase("model"); }},
      {"the token 'zz' of 'zz' and 'a' is not in model.vocab",
       [](json& j) { j["model"]["merges"][0] = {"zz", "a"}; }},
      {"'a b c' is not two tokens", [](json& j) { j["model"]["merges"] = {"a b c"}; }},
      {"a merge of 3 tokens, not two", [](json& j) { j["model"]["merges"] = {{"a", "b", "c"}}; }},
      {"model.merges: holds 3, not two tokens", [](json& j) { j["model"]["merges"] = {3}; }},
      {"the number of 'a' is -1, not an integer from 0", [](json& j) { j["model"]["vocab"]["a"] = -1; }},
      {"the number of 'a' is 2097152; the limit is 2097151",
       [](json& j) { j["model"]["vocab"]["a"] = 2097152; }},
      {"or its number 5 is there twice", [](json& j) { j["model"]["vocab"]["new"] = 5; }},
      {"model.vocab is no object",
       [](json& j) {
         j["model"]["vocab"] = {{"a", 0.5}, {"b", 1}};
         j["model"]["vocab"] = json::array();
       }},
  };
  for (const auto& [expected, change] : cases) {
    const std::string message = changed("llama2.json", change);
    INFO(expected);
    CHECK_THAT(message, ContainsSubstring(expected) && ContainsSubstring("tokenizer.json'"));
    CHECK(message.find('\n') == std::string::npos);
  }
}

TEST_CASE("merges are read in both forms, and before the tokens that they merge", "[one thread]") {
  json content = golden_json("llama2.json");
  const Ids expected = tokenizer_of(content.dump()).encode("größere Straßen <0x0A>\n the lazy dog");
  json strings = json::array();
  for (const json& merge : content["model"]["merges"])
    strings.push_back(merge[0].get<std::string>() + " " + merge[1].get<std::string>());
  json pairs = content["model"]["merges"];
  content["model"]["merges"] = strings;
  CHECK(tokenizer_of(content.dump()).encode("größere Straßen <0x0A>\n the lazy dog") == expected);
  const json vocab = content["model"]["vocab"];
  for (const char* key : {"vocab", "merges"}) content["model"].erase(key);
  std::string text = content.dump();
  const std::size_t model = text.find("\"model\":{") + 9;
  text.insert(model, "\"merges\":" + pairs.dump() + ",\"vocab\":" + vocab.dump() + ",");
  CHECK(tokenizer_of(text).encode("größere Straßen <0x0A>\n the lazy dog") == expected);
}

TEST_CASE("splitting rules that are read in other ways elsewhere, or take too long, are refused",
          "[one thread]") {
  const auto rule = [](const std::string& expression) {
    return changed("gemma.json", [&](json& j) { j["pre_tokenizer"]["pattern"] = {{"Regex", expression}}; });
  };
  for (const char* odd :
       {"\\w+", "\\b", "^a", "a$", "[a[b]]", "[a&&b]", "(?<n>a)\\k<n>", "a{2}+", "\\h", "[\\S]", "\\pL",
        "\\p{L", "\\p{^L}", "[]a]", "(?R)", "(*UTF)a", "\\1", "\\x{41}", "a\\"}) {
    INFO(odd);
    CHECK_THAT(rule(odd), ContainsSubstring("tokenizer.json': the splitting rule") &&
                              ContainsSubstring("is not supported"));
  }
  if (skip_if(!has_pcre2, "this build has no libpcre2")) return;
  for (const char* empty : {"a*", "a|", "(?=a)"})
    CHECK_THAT(rule(empty), ContainsSubstring("matches an empty text"));
  for (const char* unsound : {"(a", "[a", "\\p{Nonsense}", "a{2,1}"}) {
    INFO(unsound);
    CHECK_THAT(rule(unsound), ContainsSubstring("is not sound"));
  }
  CHECK_THAT(rule(std::string(5000, 'a')), ContainsSubstring("has 5000 bytes; the limit is 4096"));
  CHECK_THAT(rule(std::string(40, '(') + "a" + std::string(40, ')')), ContainsSubstring("is not sound"));
  CHECK_THAT(rule("(?:(?:(?:(?:a{900}){900}){900}){900})"), ContainsSubstring("splitting rule"));
  json slow = golden_json("gemma.json");
  slow["pre_tokenizer"]["pattern"] = {{"Regex", "(?:a|aa|aaa)+[bc]"}};
  const Tokenizer tokenizer = tokenizer_of(slow.dump());
  CHECK_THAT(message_of<ValueError>([&] { (void)tokenizer.encode(std::string(5000, 'a')); }),
             ContainsSubstring("cannot be searched for from byte 0 of the text on"));
  CHECK(tokenizer.decode(tokenizer.encode("aab <b>")) == "aab <b>");
}

TEST_CASE("a hostile tokenizer.json is refused before it takes memory", "[one thread]") {
  const auto padded = [](const std::string& begin, const std::string& unit, std::size_t times,
                         const std::string& end) {
    std::string units = unit;
    while (units.size() < times * unit.size()) units += units;
    return begin + units.substr(0, times * unit.size()) + end;
  };
  std::string tokens = "{\"model\":{\"vocab\":{",
              merges = "{\"model\":{\"vocab\":{\"a\":0,\"aa\":1},\"merges\":[";
  for (int i = 0; i < 600'000; ++i) tokens += fmt::format("\"{}\":{},", i, i);
  merges = padded(merges, "[\"a\",\"a\"],", 700'000, "");
  const std::vector<std::pair<const char*, std::string>> files = {
      {"nested deeper than 16 levels", padded("", "[", 10'000'000, "")},
      {"nested deeper than 16 levels", padded("", "{\"a\":", 1'000'000, "")},
      {"a string of more than 8192 bytes", padded("{\"version\":\"", "x", 30'000'000, "\"}")},
      {"a string of more than 8192 bytes", padded("{\"version\":\"", "\\\"", 10'000'000, "\"}")},
      {"a number of more than 64 bytes", padded("{\"version\":", "1", 30'000'000, "}")},
      {"more than 131072 values", padded("{\"added_tokens\":[", "1,", 10'000'000, "1]}")},
      {"more than 131072 values", padded("{\"added_tokens\":[", "{},", 10'000'000, "1]}")},
      {"more than 131072 values", padded("{\"added_tokens\":[{", "\"a\":1,", 4'000'000, "\"a\":1}]}")},
      {"model.vocab has more than 524288 tokens", tokens + "\"z\":0}}}"},
      {"model.merges has more than 655360 merges", merges + "[\"a\",\"a\"]]}}"},
      {"white space of more than 8192 bytes", padded("{\"version\":", " ", 35'000'000, "")},
      {"holds array, not an object", "[]"},
      {"holds number, not an object", "3"},
      {"is not valid JSON", ""},
      {"version is there twice", "{\"version\":1,\"version\":2}"},
      {"is not valid JSON", "{\"version\":\"\xFF\"}"},
  };
  for (const auto& [expected, content] : files) {
    const TempDirectory folder;
    posix_file_system().create(folder / "tokenizer.json")->write(content);
    std::string message;
    {
      const MemoryLimit limit(100'000'000);
      try {
        Tokenizer::read(folder / "tokenizer.json");
      } catch (const ValueError& error) {
        message = error.what();
      } catch (const std::bad_alloc&) {
        message = "it took memory";
      }
    }
    CHECK_THAT(message, ContainsSubstring(expected));
  }
  const TempDirectory folder;
  posix_file_system().create(folder / "tokenizer.json")->write(std::string((std::size_t{36} << 20) + 1, ' '));
  CHECK_THROWS_AS(Tokenizer::read(folder / "tokenizer.json"), FileError);
  posix_file_system()
      .create(folder / "tokenizer.model")
      ->write(std::string((std::size_t{16} << 20) + 1, ' '));
  CHECK_THROWS_AS(Tokenizer::read(folder / "tokenizer.model"), FileError);
}

TEST_CASE("what a SentencePiece model has that is not supported, or damaged, is named", "[one thread]") {
  const std::string sound = unknown + piece("a") + bpe;
  CHECK(refusal(sound, "tokenizer.model") == "(it was read)");
  const std::vector<std::pair<const char*, std::string>> cases = {
      {"has no pieces", ""},
      {"has no pieces", bpe},
      {"its model is of the type unigram; supported: bpe", unknown + piece("a")},
      {"its model is of the type word; supported: bpe", unknown + field(2, field(3, 3U))},
      {"its model is of the type 77; supported: bpe", unknown + field(2, field(3, 77U))},
      {"the normalizer 'nmt_nfkc' maps characters; supported: identity",
       sound + field(3, field(1, "nmt_nfkc") + field(2, "map"))},
      {"a denormalizer that maps characters is not supported", sound + field(5, field(2, "map"))},
      {"piece 1, 'b': is of type 5", unknown + piece("b", 5) + bpe},
      {"piece 1, 'b': is of type 0", unknown + piece("b", 0) + bpe},
      {"piece 2, 'a': is there twice", unknown + piece("a") + piece("a") + bpe},
      {"piece 1, '': has 0 bytes; a piece has 1 to 512", unknown + piece("") + bpe},
      {"has 513 bytes; a piece has 1 to 512", unknown + piece(std::string(513, 'a')) + bpe},
      {"is no sound UTF-8", unknown + piece("\xC3") + bpe},
      {"its score is not a number",
       unknown + field(1, field(1, "a") + std::string("\x15\0\0\xC0\x7F", 5)) + bpe},
      {"no piece is of the type unknown", piece("a") + bpe},
      {"pieces 0 and 1 are both of the type unknown", unknown + piece("b", 2) + bpe},
      {"is of the type byte, and named as none", unknown + piece("b", 6) + bpe},
      {"the piece <0x00> of byte_fallback is missing", unknown + field(2, field(3, 2U) + field(35, 1U))},
      {"the text of the piece of the type unknown has more than 512 bytes",
       unknown + field(2, field(3, 2U) + field(44, std::string(600, 'x')))},
      {"it ends within a field", sound.substr(0, sound.size() - 1)},
      {"a number of more than 64 bits", std::string(11, '\xFF')},
      {"a field without a number", std::string("\x02\x01z", 3)},
      {"a field of an unknown kind", std::string("\x0Bz", 2)},
      {"another kind of value where a text belongs", field(1, 5U)},
      {"another kind of value where a score belongs", field(1, field(1, "a") + field(2, "x"))},
      {"another kind of value where a number belongs", field(1, field(1, "a") + field(3, "x"))},
  };
  for (const auto& [expected, model] : cases) {
    INFO(expected);
    const std::string message = model_refusal(model);
    CHECK_THAT(message, ContainsSubstring(expected) && ContainsSubstring("tokenizer.model'"));
    CHECK(message.find('\n') == std::string::npos);
  }
}

TEST_CASE("a hostile SentencePiece model is refused before it takes memory", "[one thread]") {
  std::string many = unknown, wide = unknown;
  for (int i = 0; i < 600'000; ++i) many += piece(std::to_string(i));
  for (int i = 0; i < 20'000; ++i) wide += piece(fmt::format("{:0512}", i));
  std::string defined = unknown;
  for (int i = 0; i < 10'000; ++i) defined += piece(fmt::format("{:0512}", i), 4);
  const std::vector<std::pair<const char*, std::string>> files = {
      {"has more than 524288 pieces", many + bpe},
      {"its pieces have more than 4194304 characters", wide + bpe},
      {"its user-defined pieces have more than 1048576 bytes", defined + bpe},
      {"no piece is of the type unknown", field(9, std::string(15'000'000, 'x')) + piece("a") + bpe},
      {"it ends within a field", std::string("\x0A\xFF\xFF\xFF\xFF\x7F", 6)},
  };
  for (const auto& [expected, content] : files) {
    const TempDirectory folder;
    posix_file_system().create(folder / "tokenizer.model")->write(content);
    std::string message;
    {
      const MemoryLimit limit(100'000'000);
      message = message_of<ValueError>([&] { Tokenizer::read(folder / "tokenizer.model"); });
    }
    CHECK_THAT(message, ContainsSubstring(expected));
  }
}

TEST_CASE("a damaged file gives a tokenizer or an error", "[one thread]") {
  std::mt19937_64 draw(7);
  const TempDirectory folder;
  int read = 0, refused = 0;
  for (const std::string& name : tokenizer_names()) {
    const std::string whole = text_of_file(tokenizer_file(name));
    const FileSystem::Path file = folder / ("damaged" + tokenizer_file(name).extension().string());
    for (int i = 0; i < 250; ++i) {
      std::string bytes = whole;
      // The beginning and the end have what is not a list, and so most of what can be damaged in other ways.
      const auto place = [&] {
        const std::uint64_t near = draw() % std::min<std::size_t>(bytes.size(), 1500);
        return draw() % 3 == 0 ? draw() % bytes.size() : draw() % 2 == 0 ? near : bytes.size() - 1 - near;
      };
      for (std::uint64_t n = 1 + draw() % 3; n > 0; --n) switch (draw() % 5) {
          case 0:
            bytes[place()] = static_cast<char>(draw());
            break;
          case 1:
            bytes[place()] ^= static_cast<char>(1 << draw() % 8);
            break;
          case 2:
            bytes.erase(place(), 1 + draw() % 20);
            break;
          case 3: {
            const std::string part = bytes.substr(place(), draw() % 40);
            bytes.insert(place(), part);
            break;
          }
          default:
            if (draw() % 4 == 0) bytes.resize(place() + 1);
        }
      if (posix_file_system().exists(file)) posix_file_system().remove(file);
      posix_file_system().create(file)->write(bytes);
      try {
        const Tokenizer tokenizer = Tokenizer::read(file);
        ++read;
        const std::string text = random_text(draw, 30) + " the quick brown <L> [MASK] fox 123\n";
        const Ids ids = tokenizer.encode(text);
        DecodeStream stream(tokenizer);
        for (const std::int64_t id : ids) (void)stream.step(id);
        (void)tokenizer.decode(ids);
      } catch (const Error& error) {
        ++refused;
        CHECK(std::string_view(error.what()).find('\n') == std::string_view::npos);
      }
    }
  }
  CHECK(read > 100);
  CHECK(refused > 1000);
}
