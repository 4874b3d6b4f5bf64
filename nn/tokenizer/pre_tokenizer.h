// How a text is split into the words that are encoded one by one.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "nn/tokenizer/splitting_rule.h"

namespace sherd::nn::tokens {

/// What becomes of what a rule finds, in the words of `tokenizers`.
enum class SplitBehavior { isolated, removed, merged_with_previous, merged_with_next, contiguous };

/// A character or text that is found as it stands.
struct Literal {
  std::string text;
};
struct Split {
  std::variant<SplittingRule, Literal> rule;
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;  ///< what is not found counts as found
};
enum class PrependScheme { always, first, never };
/// A symbol for spaces, and one in front: of every text, or of the one with which the whole begins.
struct Metaspace {
  std::string symbol;
  PrependScheme prepend = PrependScheme::always;
};
/// A space in front of a text that has none there.
struct PrefixSpace {};
using PreTokenizerStep = std::variant<Split, Metaspace, PrefixSpace>;

class PreTokenizer {
 public:
  using OnWord = std::function<void(std::string_view)>;

  void add(PreTokenizerStep step);
  /// Calls `on_word` with the words of a text in order. `first`: the whole begins with it.
  void run(std::string_view text, bool first, MatchWorkspace& workspace, const OnWord& on_word) const;

 private:
  struct Runner;
  std::vector<PreTokenizerStep> steps_;
};

}  // namespace sherd::nn::tokens
