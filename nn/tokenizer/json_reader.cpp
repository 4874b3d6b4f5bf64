#include "nn/tokenizer/json_reader.h"

#include <algorithm>
#include <utility>

#include "nn/tokenizer/bytes.h"
#include "nn/tokenizer/json_file.h"
#include "nn/tokenizer/json_steps.h"
#include "runtime/error.h"
#include "runtime/shown.h"

namespace sherd::nn::tokens {
namespace {

constexpr std::size_t longest_added = 1024, most_added_bytes = std::size_t{1} << 20;

class JsonReader {
 public:
  JsonReader(JsonFile file, const std::string& where) : file_(std::move(file)), where_(where) {}

  std::unique_ptr<Pipeline> run() {
    check_model();
    for (const char* name : {"truncation", "padding"})
      if (!section(name).is_null()) section(name).refuse("null; cut or fill the tokens after encode");
    parts_->normalizer = normalizer_of(section("normalizer"));
    WordRules words = word_rules_of(section("pre_tokenizer"));
    parts_->pre_tokenizer = std::move(words.pre_tokenizer);
    parts_->decoder = Decoder(decoder_rules_of(section("decoder")));
    parts_->vocabulary = std::move(file_.vocabulary);
    const BpeOptions options = bpe_options(words.alphabet);
    check_merges(options);
    parts_->bpe.emplace(parts_->vocabulary, std::move(file_.merges), options);
    read_added_tokens();
    Surroundings around = surroundings_of(section("post_processor"), parts_->vocabulary);
    parts_->prefix = std::move(around.prefix);
    parts_->suffix = std::move(around.suffix);
    parts_->make_texts();
    for (const auto& [id, special] : specials_) parts_->special[id] = special;
    for (const auto& [id, form] : forms_) parts_->texts[id] = parts_->decoder.text_of(form);
    return std::move(parts_);
  }

 private:
  Setting part(const auto& parts, const std::string& name, const std::string& path) const {
    static const nlohmann::json nothing;
    const auto found = parts.find(name);
    return {found == parts.end() ? nothing : found->second, where_, path};
  }
  Setting section(const std::string& name) const { return part(file_.sections, name, name); }
  Setting model(const std::string& name) const { return part(file_.model, name, "model." + name); }

  void check_model() const {
    if (const Setting type = model("type"); !type.is_null() && type.text() != "BPE") type.refuse("BPE");
    check<ValueError>(file_.has_vocabulary && file_.has_merges,
                      "{}: has no model.{}; a tokenizer of the model BPE has vocab and merges", where_,
                      file_.has_vocabulary ? "merges" : "vocab");
    if (const Setting dropout = model("dropout"); !dropout.is_null() && file_.model.at("dropout") != 0)
      dropout.refuse("null, 0");
    for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (const Setting text = model(name); !text.is_null() && !text.text().empty())
        text.refuse("null, an empty text");
  }

  BpeOptions bpe_options(Alphabet alphabet) const {
    BpeOptions options{.alphabet = alphabet,
                       .ignore_merges = model("ignore_merges").flag(false),
                       .fuse_unknown = model("fuse_unk").flag(false)};
    if (const Setting token = model("unk_token"); !token.is_null()) {
      options.unknown = parts_->vocabulary.find(token.text());
      const std::string& text = token.text();
      if (options.fuse_unknown && !text.empty() && first_character(text).bytes == text.size())
        token.fault("a single character, which texts may have, is not supported beside fuse_unk");
      if (!options.unknown && alphabet != Alphabet::bytes)
        token.fault("'" + shown(token.text()) + "' is not in model.vocab");
    }
    if (const Setting fallback = model("byte_fallback"); fallback.flag(false)) {
      if (alphabet == Alphabet::bytes) fallback.fault("is not supported beside the pre-tokenizer ByteLevel");
      options.byte_fallback.emplace();
      for (int byte = 0; byte < 256; ++byte) {
        const std::string token = byte_token(static_cast<unsigned char>(byte));
        const std::optional<Id> id = parts_->vocabulary.find(token);
        if (!id) fallback.fault("the token " + token + " is not in model.vocab");
        (*options.byte_fallback)[static_cast<std::size_t>(byte)] = *id;
      }
    }
    return options;
  }

  /// Tokens that stand for characters without one take no part in merges.
  void check_merges(const BpeOptions& options) const {
    const auto stands_in = [&](Id id) {
      return id == options.unknown ||
             (options.byte_fallback && byte_of_token(parts_->vocabulary.text(id)).has_value());
    };
    file_.merges.visit([&](Symbol left, Symbol right, const Merge& merge) {
      for (const Id id : {left, right, merge.result})
        check<ValueError>(!stands_in(id), "{}: model.merges: merges of the token '{}' are not supported",
                          where_, shown(parts_->vocabulary.text(id)));
    });
  }

  void read_added_tokens() {
    const Setting list = section("added_tokens");
    if (list.is_null()) return;
    std::vector<AddedToken> raw, normalized;
    std::size_t bytes = 0;
    for (const Setting& setting : list.elements()) {
      const AddedToken token = added_token(setting);
      const bool in_normalized = setting.at("normalized").flag(!token.special);
      bytes += token.content.size();
      if (bytes > most_added_bytes)
        list.fault("their texts have more than " + std::to_string(most_added_bytes) + " bytes, the limit");
      number(setting, token);
      std::string memory;
      const std::string form(in_normalized ? parts_->normalizer.run(token.content, memory) : token.content);
      if (form.empty()) setting.fault("has no text when it is normalized");
      AddedToken found = token;
      found.content = form;
      (in_normalized ? normalized : raw).push_back(std::move(found));
      specials_.emplace_back(token.id, token.special);
      if (form != token.content) forms_.emplace_back(token.id, form);
    }
    check_unique(list, raw);
    check_unique(list, normalized);
    parts_->raw = AddedTokens(std::move(raw));
    parts_->normalized = AddedTokens(std::move(normalized));
  }

  static AddedToken added_token(const Setting& setting) {
    AddedToken token{.content = setting.at("content").text(),
                     .id = static_cast<Id>(setting.at("id").integer(0, most_id - 1)),
                     .single_word = setting.at("single_word").flag(false),
                     .lstrip = setting.at("lstrip").flag(false),
                     .rstrip = setting.at("rstrip").flag(false),
                     .special = setting.at("special").flag(false)};
    if (token.content.empty() || token.content.size() > longest_added)
      setting.at("content").refuse("a text of 1 to " + std::to_string(longest_added) + " bytes");
    return token;
  }

  /// Gives a token its number, which the vocabulary may have for it already.
  void number(const Setting& setting, const AddedToken& token) {
    const std::optional<Id> own = parts_->vocabulary.find(token.content);
    if (own && *own != token.id)
      setting.at("id").fault("is " + std::to_string(token.id) +
                             ", but model.vocab or another added token has '" + shown(token.content) +
                             "' as " + std::to_string(*own));
    if (!own && !parts_->vocabulary.add(token.content, token.id))
      setting.at("id").fault("'" + shown(parts_->vocabulary.text(token.id)) + "' has the number " +
                             std::to_string(token.id) + " too");
  }

  static void check_unique(const Setting& list, std::vector<AddedToken>& tokens) {
    std::ranges::sort(tokens, {}, &AddedToken::content);
    const auto twice = std::ranges::adjacent_find(tokens, {}, &AddedToken::content);
    if (twice != tokens.end()) list.fault("'" + shown(twice->content) + "' is there twice");
  }

  JsonFile file_;
  const std::string& where_;
  std::unique_ptr<Pipeline> parts_ = std::make_unique<Pipeline>();
  std::vector<std::pair<Id, bool>> specials_;      // added tokens, and whether they are special
  std::vector<std::pair<Id, std::string>> forms_;  // those whose normalized text is another
};

}  // namespace

std::unique_ptr<Pipeline> read_json(std::string text, const std::string& where) {
  JsonFile file = parse_json_file(text, where);
  text = std::string();
  return JsonReader(std::move(file), where).run();
}

}  // namespace sherd::nn::tokens
