#include "nn/tokenizer/json_steps.h"

#include <string>

namespace sherd::nn::tokens {
namespace {

// Of one kind after the other; the known tokenizers have up to five.
constexpr std::size_t most_steps = 32;

/// The members of a Sequence, or the one that it is.
std::vector<Setting> steps_of(const Setting& setting, const std::string& list) {
  if (setting.is_null()) return {};
  if (setting.type() != "Sequence") return {setting};
  std::vector<Setting> steps = setting.at(list).elements();
  if (steps.size() > most_steps)
    setting.at(list).fault("has more than " + std::to_string(most_steps) + " steps, the limit");
  return steps;
}

/// The text of a pattern that is no expression.
std::string literal_of(const Setting& pattern) {
  const Setting text = pattern.at("String");
  if (text.is_null()) pattern.refuse("a String");
  if (text.text().empty()) text.fault("is empty");
  return text.text();
}

/// A text that is put in, perhaps in many places.
const std::string& inserted(const Setting& setting) {
  constexpr std::size_t most_bytes = 64;
  if (setting.text().size() > most_bytes)
    setting.refuse("a text of at most " + std::to_string(most_bytes) + " bytes");
  return setting.text();
}

// ---- pre-tokenizers ----

constexpr std::string_view gpt2_rule =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

SplitBehavior behavior_of(const Setting& setting) {
  const std::string& name = setting.text();
  if (name == "Isolated") return SplitBehavior::isolated;
  if (name == "Removed") return SplitBehavior::removed;
  if (name == "MergedWithPrevious") return SplitBehavior::merged_with_previous;
  if (name == "MergedWithNext") return SplitBehavior::merged_with_next;
  if (name == "Contiguous") return SplitBehavior::contiguous;
  setting.refuse("Isolated, Removed, MergedWithPrevious, MergedWithNext, Contiguous");
}

Split split_of(const Setting& setting) {
  const Setting pattern = setting.at("pattern");
  Split split{.rule = Literal{},
              .behavior = behavior_of(setting.at("behavior")),
              .invert = setting.at("invert").flag(false)};
  if (const Setting expression = pattern.at("Regex"); !expression.is_null())
    split.rule = SplittingRule(expression.text());
  else
    split.rule = Literal{literal_of(pattern)};
  return split;
}

void add_byte_level(const Setting& setting, WordRules& rules) {
  if (setting.at("add_prefix_space").flag(true)) rules.pre_tokenizer.add(PrefixSpace{});
  if (setting.at("use_regex").flag(true)) rules.pre_tokenizer.add(Split{SplittingRule(gpt2_rule)});
  rules.alphabet = Alphabet::bytes;
}

PrependScheme prepend_scheme_of(const Setting& setting) {
  const Setting scheme = setting.at("prepend_scheme");
  const bool space = setting.at("add_prefix_space").flag(true);
  if (scheme.is_null()) return space ? PrependScheme::always : PrependScheme::never;
  if (scheme.text() != "never" && !space) scheme.fault("contradicts add_prefix_space, which is false");
  if (scheme.text() == "always") return PrependScheme::always;
  if (scheme.text() == "first") return PrependScheme::first;
  if (scheme.text() == "never") return PrependScheme::never;
  scheme.refuse("always, first, never");
}

std::string symbol_of(const Setting& setting) {
  const std::string& symbol = setting.at("replacement").text();
  if (symbol.empty() || first_character(symbol).bytes != symbol.size())
    setting.at("replacement").refuse("one character");
  return symbol;
}

void add_metaspace(const Setting& setting, WordRules& rules) {
  const std::string symbol = symbol_of(setting);
  rules.pre_tokenizer.add(Metaspace{symbol, prepend_scheme_of(setting)});
  if (setting.at("split").flag(true))
    rules.pre_tokenizer.add(Split{Literal{symbol}, SplitBehavior::merged_with_next});
}

// ---- decoders ----

/// Reads the steps of a decoder, which come in one order.
class DecoderReader {
 public:
  void step(const Setting& setting) {
    const std::string& type = setting.type();
    if (complete_) setting.fault("nothing is supported after ByteLevel and Metaspace");
    if (type == "ByteLevel") {
      if (started_) setting.fault("ByteLevel is supported alone");
      rules_.bytes = complete_ = true;
    } else if (type == "Metaspace") {
      if (started_) setting.fault("Metaspace is supported alone");
      rules_.metaspace = symbol_of(setting);
      if (prepend_scheme_of(setting) == PrependScheme::never)
        rules_.replace.emplace_back(std::exchange(rules_.metaspace, {}).value(), " ");
      complete_ = true;
    } else if (type == "Replace") {
      if (rules_.byte_tokens || fused_) setting.fault("Replace is supported before ByteFallback and Fuse");
      rules_.replace.emplace_back(literal_of(setting.at("pattern")), inserted(setting.at("content")));
    } else if (type == "ByteFallback") {
      if (rules_.byte_tokens || fused_) setting.fault("ByteFallback is supported once, before Fuse");
      rules_.byte_tokens = UnsoundRun::nothing;
    } else if (type == "Fuse") {
      fused_ = true;
    } else if (type == "Strip") {
      strip(setting);
    } else {
      setting.at("type").refuse("ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip, Sequence");
    }
    started_ = true;
  }
  DecoderRules take() { return std::move(rules_); }

 private:
  void strip(const Setting& setting) {
    if (!fused_ || !rules_.strip.empty()) setting.fault("Strip is supported once, after Fuse");
    rules_.strip = inserted(setting.at("content"));
    if (rules_.strip.empty()) setting.at("content").refuse("one character");
    rules_.strip_most = static_cast<std::uint32_t>(setting.at("start").integer(0, 1 << 20));
    if (setting.at("stop").integer(0, 1 << 20) != 0) setting.at("stop").refuse("0");
  }

  DecoderRules rules_;
  bool started_ = false, fused_ = false, complete_ = false;
};

// ---- post-processors ----

/// The numbers of a special token of a template.
std::vector<Id> template_ids(const Setting& tokens, const std::string& name, const Vocabulary& vocabulary) {
  const Setting token = tokens.at(name);
  if (token.is_null()) tokens.fault("lacks '" + name + "', which the template has");
  std::vector<Id> ids;
  for (const Setting& id : token.at("ids").elements()) {
    ids.push_back(static_cast<Id>(id.integer(0, most_id - 1)));
    if (!vocabulary.has(ids.back())) id.fault("no token has this number");
  }
  return ids;
}

Surroundings template_of(const Setting& setting, const Vocabulary& vocabulary) {
  Surroundings around;
  bool behind = false;
  for (const Setting& piece : setting.at("single").elements()) {
    if (const Setting text = piece.at("Sequence"); !text.is_null()) {
      if (behind || text.at("id").text() != "A") piece.refuse("the text A, once");
      behind = true;
      continue;
    }
    for (const Id id :
         template_ids(setting.at("special_tokens"), piece.at("SpecialToken").at("id").text(), vocabulary))
      (behind ? around.suffix : around.prefix).push_back(id);
  }
  if (!behind) setting.at("single").refuse("the text A, once");
  if (around.prefix.size() + around.suffix.size() > most_steps)
    setting.at("single").fault("has more than " + std::to_string(most_steps) + " special tokens, the limit");
  return around;
}

}  // namespace

Normalizer normalizer_of(const Setting& setting) {
  Normalizer normalizer;
  for (const Setting& step : steps_of(setting, "normalizers")) {
    const std::string& type = step.type();
    if (type == "NFC")
      normalizer.add(Nfc{});
    else if (type == "Prepend")
      normalizer.add(Prepend{inserted(step.at("prepend"))});
    else if (type == "Replace")
      normalizer.add(Replace{literal_of(step.at("pattern")), inserted(step.at("content"))});
    else
      step.at("type").refuse("NFC, Prepend, Replace, Sequence");
  }
  return normalizer;
}

WordRules word_rules_of(const Setting& setting) {
  WordRules rules;
  for (const Setting& step : steps_of(setting, "pretokenizers")) {
    const std::string& type = step.type();
    if (rules.alphabet == Alphabet::bytes) step.fault("nothing is supported after ByteLevel");
    if (type == "ByteLevel") {
      add_byte_level(step, rules);
    } else if (type == "Split") {
      rules.pre_tokenizer.add(split_of(step));
    } else if (type == "Digits") {
      const bool each = step.at("individual_digits").flag(false);
      rules.pre_tokenizer.add(Split{SplittingRule(each ? "\\p{N}" : "\\p{N}+")});
    } else if (type == "Metaspace") {
      add_metaspace(step, rules);
    } else {
      step.at("type").refuse("ByteLevel, Split, Digits, Metaspace, Sequence");
    }
  }
  return rules;
}

DecoderRules decoder_rules_of(const Setting& setting) {
  if (setting.is_null()) return {.separator = " "};
  DecoderReader reader;
  for (const Setting& step : steps_of(setting, "decoders")) reader.step(step);
  return reader.take();
}

Surroundings surroundings_of(const Setting& setting, const Vocabulary& vocabulary) {
  Surroundings around;
  for (const Setting& step : steps_of(setting, "processors")) {
    if (step.type() == "ByteLevel") continue;  // it changes offsets alone
    if (step.type() != "TemplateProcessing")
      step.at("type").refuse("TemplateProcessing, ByteLevel, Sequence");
    Surroundings more = template_of(step, vocabulary);
    around.prefix.insert(around.prefix.begin(), more.prefix.begin(), more.prefix.end());
    around.suffix.insert(around.suffix.end(), more.suffix.begin(), more.suffix.end());
  }
  return around;
}

}  // namespace sherd::nn::tokens
