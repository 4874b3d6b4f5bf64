// The text of a sequence while it is generated, up to a text that ends it.
//
//   nn::TextStream text(tokenizer, {.stop_texts = {"\n\n"}, .behind = prompt});
//   nn::generate(model, std::span(&prompt, 1), {}, [&](std::size_t, std::int64_t token) {
//     std::cout << text.step(token);
//     return text.stopped() ? nn::Sequel::ends : nn::Sequel::goes_on;
//   });
//   std::cout << text.finish();
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nn/tokenizer.h"

namespace sherd::nn {

/// Gives a text out in pieces up to the first of some texts, wherever the pieces are cut: what could be the
/// beginning of one is held until it is known.
class SHERD_API StopTexts {
 public:
  /// ValueError for an empty text, and for one that is not UTF-8.
  explicit StopTexts(std::vector<std::string> texts);

  /// What can be given out with `piece`. Of several texts the one that is complete first counts, of those
  /// that end together the longest.
  std::string step(std::string_view piece);
  /// What was held. Nothing where a text came.
  std::string finish();
  /// Whether one of the texts came; behind it nothing is given out.
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> texts_;
  std::string held_;
  bool stopped_ = false;
};

/// For `TextStream`.
struct TextStreamOptions {
  std::vector<std::string> stop_texts{};
  DecodeOptions decode{};
  /// Tokens before the first, whose text is not given out: a SentencePiece tokenizer takes the space off the
  /// first token of all.
  std::span<const std::int64_t> behind{};
};

/// Decodes tokens as they come, in whole characters, up to the first of the stop texts, across tokens too.
class SHERD_API TextStream {
 public:
  /// Errors as of StopTexts.
  explicit TextStream(const Tokenizer& tokenizer, const TextStreamOptions& options = {});

  /// The text that is certain with this token; may be empty.
  std::string step(std::int64_t token);
  /// The rest, when no token follows.
  std::string finish();
  bool stopped() const { return stops_.stopped(); }

 private:
  DecodeStream decode_;
  StopTexts stops_;
};

}  // namespace sherd::nn
