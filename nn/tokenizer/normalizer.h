// What is done to a text before it is split.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace sherd::nn::tokens {

/// Characters composed (Unicode's form C).
struct Nfc {};
/// In front of every text that is not empty.
struct Prepend {
  std::string text;
};
struct Replace {
  std::string from, to;
};
/// What SentencePiece does to spaces; `symbol` stands for them.
struct Spaces {
  bool remove_extra = false;  ///< those at both ends, and all but one of several
  bool add_dummy = true;      ///< one in front, or, if `suffix`, behind
  bool suffix = false;
  std::string symbol;
};
using NormalizerStep = std::variant<Nfc, Prepend, Replace, Spaces>;

class Normalizer {
 public:
  /// NotImplementedError for Nfc in a build without libutf8proc.
  void add(NormalizerStep step);
  bool empty() const { return steps_.empty(); }
  /// The normalized text: `text` itself, or what `memory` holds then. ValueError where it is many times as
  /// long.
  std::string_view run(std::string_view text, std::string& memory) const;

 private:
  std::vector<NormalizerStep> steps_;
};

/// `text` in form C, appended; of sound UTF-8.
void append_nfc(std::string& out, std::string_view text);

}  // namespace sherd::nn::tokens
