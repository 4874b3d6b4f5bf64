// The tokens of a vocabulary and their numbers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sherd::nn::tokens {

using Id = std::uint32_t;

// What a file may have at most, some twice as much as the largest that are known.
constexpr std::size_t most_tokens = std::size_t{1} << 19, most_token_bytes = std::size_t{1} << 24,
                      most_merges = 640 * std::size_t{1024};
constexpr Id most_id = Id{1} << 21;

class Vocabulary {
 public:
  /// False, and nothing changes, where the text or the number is taken.
  bool add(std::string_view text, Id id);

  std::optional<Id> find(std::string_view text) const;
  bool has(Id id) const { return id < places_.size() && places_[id] != none; }
  /// Empty for a number without a token.
  std::string_view text(Id id) const;
  /// One more than the largest number.
  Id end() const { return static_cast<Id>(places_.size()); }
  std::size_t size() const { return entries_.size(); }
  std::size_t bytes() const { return texts_.size(); }

 private:
  static constexpr std::uint32_t none = ~std::uint32_t{0};
  struct Entry {
    std::uint32_t begin, bytes;
    Id id;
  };
  std::string_view text(const Entry& e) const { return std::string_view(texts_).substr(e.begin, e.bytes); }
  /// Where the text stands in the table, or would stand.
  std::size_t slot(std::string_view text) const;
  void grow();

  std::string texts_;
  std::vector<Entry> entries_;
  std::vector<std::uint32_t> places_;  // by number: which entry
  std::vector<std::uint32_t> table_;   // by hash: which entry; its size is a power of two
};

}  // namespace sherd::nn::tokens
