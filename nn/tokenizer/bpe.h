// Byte-pair encoding of words, and what becomes of characters that no token has.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "nn/tokenizer/junctions.h"
#include "nn/tokenizer/merging.h"
#include "nn/tokenizer/vocabulary.h"
#include "nn/tokenizer/word_cache.h"

namespace sherd::nn::tokens {

/// What a merge begins with.
enum class Alphabet { bytes, characters };

struct BpeOptions {
  Alphabet alphabet = Alphabet::characters;
  bool ignore_merges = false;                          ///< a word that is a token is that token
  std::optional<std::array<Id, 256>> byte_fallback{};  ///< the tokens of bytes, for what has none
  std::optional<Id> unknown{};                         ///< otherwise; without it such characters are left out
  bool fuse_unknown = false;                           ///< one for several beside each other
};

/// What one thread needs to encode words.
struct BpeWorkspace {
  WordCache cache;
  Merging merging;
  std::vector<Symbol> symbols;
  std::vector<Id> ids;
};

class Bpe {
 public:
  /// Of the tokens that are in the vocabulary now; it outlives this.
  Bpe(const Vocabulary& vocabulary, Merges merges, const BpeOptions& options);

  /// Appends the tokens of a word, which is sound UTF-8, and bytes at will for the alphabet of bytes.
  void encode(std::string_view word, BpeWorkspace& workspace, std::vector<std::int64_t>& ids) const;

 private:
  Symbol symbol_of(char32_t code) const;
  void add_junctions();
  /// Of a word that is a token as it stands.
  std::optional<Id> whole(std::string_view word) const;
  void encode_cut(std::string_view word, BpeWorkspace& workspace, std::vector<std::int64_t>& ids) const;
  void encode_piece(std::string_view piece, BpeWorkspace& workspace, std::vector<std::int64_t>& ids,
                    bool goes_on) const;
  /// Fills the workspace's `ids`.
  void merge(std::string_view piece, BpeWorkspace& workspace) const;
  void append(Symbol symbol, std::vector<Id>& ids) const;

  const Vocabulary& vocabulary_;
  Merges merges_;
  BpeOptions options_;
  std::vector<bool> has_;        // the tokens, by number
  std::vector<Symbol> symbols_;  // of bytes, or of characters below 65536
  std::unordered_map<char32_t, Symbol> more_symbols_;
  Junctions junctions_;
  bool leaves_out_;
};

}  // namespace sherd::nn::tokens
