// Tokens that are found in a text before it is split: special ones, and those that users added.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nn/tokenizer/splitting_rule.h"
#include "nn/tokenizer/vocabulary.h"

namespace sherd::nn::tokens {

struct AddedToken {
  std::string content;
  Id id = 0;
  bool single_word = false;  ///< not within a word
  bool lstrip = false;       ///< takes white space in front of it along
  bool rstrip = false;       ///< and behind it
  bool special = false;
};

/// A part of a text: an added token, or what lies between two.
struct TextPart {
  Range range;
  std::optional<Id> id;
};

class AddedTokens {
 public:
  /// NotImplementedError for `single_word` in a build without libpcre2.
  explicit AddedTokens(std::vector<AddedToken> tokens = {});
  bool empty() const { return tokens_.empty(); }
  /// The parts of `text`, which is sound UTF-8, in order: the longest token at the first place that has one,
  /// and so on. `special`: special tokens too.
  std::vector<TextPart> split(std::string_view text, bool special, MatchWorkspace& workspace) const;

 private:
  /// The longest token with which `text` begins.
  const AddedToken* longest_at(std::string_view text) const;
  bool is_single_word(std::string_view text, Range range, MatchWorkspace& workspace) const;

  std::vector<AddedToken> tokens_;                                    // by content
  std::array<std::pair<std::uint32_t, std::uint32_t>, 256> begin_{};  // those that begin with a byte
  std::optional<SplittingRule> word_;
};

}  // namespace sherd::nn::tokens
