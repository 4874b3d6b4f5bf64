// What words were encoded to, of which a text has few and the same ones.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nn/tokenizer/vocabulary.h"

namespace sherd::nn::tokens {

/// For one thread at a time. When it is full it forgets everything.
class WordCache {
 public:
  static constexpr std::size_t longest_word = 64;  // bytes

  /// The tokens of a word that was put in; valid until the next `put`.
  std::optional<std::span<const Id>> find(std::string_view word, std::uint64_t hash) const;
  /// Of a word that is not here, and not longer than the longest.
  void put(std::string_view word, std::uint64_t hash, std::span<const Id> ids);

 private:
  static constexpr std::size_t most_words = std::size_t{1} << 15;
  struct Entry {
    std::uint64_t hash = 0;
    std::uint32_t word = 0, ids = 0;  // where they begin
    std::uint32_t bytes = 0, count = 0;
  };
  void grow();

  std::size_t size_ = 0;
  std::vector<Entry> table_ = std::vector<Entry>(256);  // an entry without bytes is empty
  std::string words_;
  std::vector<Id> ids_;
};

}  // namespace sherd::nn::tokens
