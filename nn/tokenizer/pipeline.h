// The parts of a tokenizer, whatever file they came from.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nn/tokenizer/added_tokens.h"
#include "nn/tokenizer/bpe.h"
#include "nn/tokenizer/decoder.h"
#include "nn/tokenizer/normalizer.h"
#include "nn/tokenizer/pre_tokenizer.h"
#include "nn/tokenizer/utf8.h"
#include "nn/tokenizer/vocabulary.h"

namespace sherd::nn::tokens {

/// What readers fill in. It stays where it is: the encoding refers to the vocabulary.
struct Pipeline {
  Pipeline() = default;
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  Vocabulary vocabulary;
  Malformed malformed = Malformed::beginnings;
  AddedTokens raw, normalized;  // found in the text as it comes, and in the normalized one
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  std::optional<Bpe> bpe;
  std::vector<Id> prefix, suffix;  // special tokens around a text
  Decoder decoder;
  std::vector<TokenText> texts;  // of tokens, by number
  std::vector<bool> special;     // left out of decoded text, by number
  std::optional<Id> bos, eos;

  /// The last step of reading: what is decoded of each token in the vocabulary.
  void make_texts();
};

/// Encodes and decodes. Threads may share one.
class Coder {
 public:
  explicit Coder(std::unique_ptr<const Pipeline> parts) : parts_(std::move(parts)) {}
  Coder(const Coder&) = delete;
  Coder& operator=(const Coder&) = delete;

  const Pipeline& parts() const { return *parts_; }
  std::vector<std::int64_t> encode(std::string_view text, bool add_special, bool special_in_text) const;
  /// Null for a number without a token, and, if `skip_special`, for a special one.
  const TokenText* text_of(std::int64_t id, bool skip_special) const;

 private:
  struct Workspace {
    BpeWorkspace bpe;
    MatchWorkspace match;
  };
  /// A workspace that nobody else has, until it goes back.
  class Loan;
  void encode_part(std::string_view part, bool first, bool special, Workspace& workspace,
                   std::vector<std::int64_t>& ids) const;

  std::unique_ptr<const Pipeline> parts_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Workspace>> idle_;
};

}  // namespace sherd::nn::tokens
