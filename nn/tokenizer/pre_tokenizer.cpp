#include "nn/tokenizer/pre_tokenizer.h"

#include <optional>
#include <utility>

#include "nn/tokenizer/utf8.h"

namespace sherd::nn::tokens {
namespace {

/// Joins ranges, each found or not, to pieces, and hands these over.
template <class F>
class Pieces {
 public:
  Pieces(SplitBehavior behavior, F& on_piece) : behavior_(behavior), on_piece_(on_piece) {}

  void add(Range range, bool found) {
    if (range.begin == range.end) return;
    const bool joins = joins_held(found);
    was_found_ = found;
    if (joins) {
      held_.end = range.end;
      return;
    }
    finish();
    if (behavior_ != SplitBehavior::removed || !found) held_ = range;
  }
  void finish() {
    if (held_.begin != held_.end) on_piece_(held_);
    held_ = {0, 0};
  }

 private:
  /// Whether the next range goes into the piece that is held.
  bool joins_held(bool found) const {
    if (held_.begin == held_.end) return false;
    switch (behavior_) {
      case SplitBehavior::contiguous:
        return found == was_found_;
      case SplitBehavior::merged_with_previous:
        return found && !was_found_;
      case SplitBehavior::merged_with_next:
        return !found && was_found_;
      case SplitBehavior::isolated:
      case SplitBehavior::removed:
        return false;
    }
    return false;
  }

  SplitBehavior behavior_;
  F& on_piece_;
  Range held_{0, 0};
  bool was_found_ = false;
};

std::optional<Range> found_in(const std::variant<SplittingRule, Literal>& rule, std::string_view text,
                              std::size_t from, MatchWorkspace& workspace) {
  if (const auto* expression = std::get_if<SplittingRule>(&rule))
    return expression->find(text, from, workspace);
  const std::string& literal = std::get<Literal>(rule).text;
  const std::size_t at = text.find(literal, from);
  return at == std::string_view::npos ? std::nullopt : std::optional(Range{at, at + literal.size()});
}

}  // namespace

/// The steps from `step` on, for a text that came out of the ones before.
struct PreTokenizer::Runner {
  const std::vector<PreTokenizerStep>& steps;
  MatchWorkspace& workspace;
  const OnWord& on_word;

  void run(std::size_t step, std::string_view text, bool first) const {
    if (text.empty()) return;
    if (step == steps.size()) return on_word(text);
    std::visit([&](const auto& s) { apply(s, step, text, first); }, steps[step]);
  }

  void apply(const Split& split, std::size_t step, std::string_view text, bool first) const {
    const auto on_piece = [&](Range piece) {
      run(step + 1, text.substr(piece.begin, piece.end - piece.begin), first && piece.begin == 0);
    };
    Pieces pieces(split.behavior, on_piece);
    std::size_t at = 0;
    while (at < text.size()) {
      const std::optional<Range> found = found_in(split.rule, text, at, workspace);
      if (!found) break;
      pieces.add({at, found->begin}, split.invert);
      pieces.add(*found, !split.invert);
      at = found->end;
    }
    pieces.add({at, text.size()}, split.invert);
    pieces.finish();
  }

  void apply(const Metaspace& step_here, std::size_t step, std::string_view text, bool first) const {
    std::string spaced;
    const bool has_one = text.starts_with(' ') || text.starts_with(step_here.symbol);
    if (!has_one &&
        (step_here.prepend == PrependScheme::always || (step_here.prepend == PrependScheme::first && first)))
      spaced = step_here.symbol;
    append_replaced(spaced, text, " ", step_here.symbol);
    run(step + 1, spaced, first);
  }

  void apply(const PrefixSpace&, std::size_t step, std::string_view text, bool first) const {
    if (text.starts_with(' ')) return run(step + 1, text, first);
    run(step + 1, " " + std::string(text), first);
  }
};

void PreTokenizer::add(PreTokenizerStep step) { steps_.push_back(std::move(step)); }

void PreTokenizer::run(std::string_view text, bool first, MatchWorkspace& workspace,
                       const OnWord& on_word) const {
  Runner{steps_, workspace, on_word}.run(0, text, first);
}

}  // namespace sherd::nn::tokens
