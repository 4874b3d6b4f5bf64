// Tokens to text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nn/tokenizer/vocabulary.h"

namespace sherd::nn::tokens {

/// What a run of tokens of bytes becomes that is not sound UTF-8.
enum class UnsoundRun {
  characters,  ///< sound characters in it stay, each other byte becomes U+FFFD (SentencePiece)
  nothing      ///< each of its bytes becomes U+FFFD (`tokenizers`)
};

/// How the texts of tokens become one text. The members are applied in this order.
struct DecoderRules {
  /// Texts are bytes, spelled as characters, of text whose unsound parts become U+FFFD.
  bool bytes = false;
  /// In each token's text, one after the other.
  std::vector<std::pair<std::string, std::string>> replace{};
  /// Tokens as `<0x0A>` are bytes.
  std::optional<UnsoundRun> byte_tokens{};
  /// At most so many of this text are taken off the beginning of the whole.
  std::string strip{};
  std::uint32_t strip_most = 0;
  /// Between the texts of tokens.
  std::string separator{};
  /// Stands for a space, and is taken out of the first token.
  std::optional<std::string> metaspace{};
  /// Stands for a space (SentencePiece). One in front of the first text is taken off, or, of `all_leading`,
  /// one in front of each token before text comes.
  std::optional<std::string> leading_symbol{};
  bool leading_is_taken = false, all_leading = false;
};

/// What is written of a token; without one, nothing.
struct TokenText {
  std::string text;
  std::optional<unsigned char> byte{};
  bool in_front = true;  ///< may have a leading symbol
};

class Decoder {
 public:
  explicit Decoder(DecoderRules rules = {}) : rules_(std::move(rules)) {}
  const DecoderRules& rules() const { return rules_; }
  /// A token's text as the vocabulary has it, after what is done to each for itself.
  TokenText text_of(std::string_view token) const;

 private:
  DecoderRules rules_;
};

/// The text of tokens that come one after the other.
class Decoding {
 public:
  explicit Decoding(const DecoderRules& rules) : rules_(&rules), strips_left_(rules.strip_most) {}

  void add(const TokenText& token);
  /// Settles what is whole: sound characters, of a run of bytes too, which may go on.
  void settle();
  /// There are no more tokens.
  void finish();
  /// What was settled since the last call.
  std::string take();

 private:
  void add_text(std::string_view text);
  void finish_run();

  const DecoderRules* rules_;
  std::string out_;      // settled
  std::string pending_;  // bytes, not all of whole characters
  std::uint32_t strips_left_ = 0;
  bool first_ = true;         // no token has come
  bool begun_ = false;        // text has come
  bool symbol_gone_ = false;  // the leading symbol was taken off
};

}  // namespace sherd::nn::tokens
