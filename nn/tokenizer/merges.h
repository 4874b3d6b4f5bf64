// The rules of byte-pair encoding: which two symbols become which one, and which first.
#pragma once

#include <cstdint>
#include <vector>

#include "nn/tokenizer/hash.h"

namespace sherd::nn::tokens {

/// A token's number, or a character that has no token of its own.
using Symbol = std::uint32_t;
constexpr Symbol first_bare_character = Symbol{1} << 31;
constexpr Symbol bare_character(char32_t code) { return first_bare_character | code; }

struct Merge {
  std::uint32_t rank;  ///< the least goes first
  Symbol result;
};

class Merges {
 public:
  /// In place of an older one of the two.
  void set(Symbol left, Symbol right, Merge merge);
  /// Null where the two do not merge.
  const Merge* find(Symbol left, Symbol right) const {
    const std::uint64_t key = key_of(left, right);
    for (std::size_t at = slot(key);; at = (at + 1) & mask_) {
      if (table_[at].key == key) return &table_[at].merge;
      if (table_[at].key == empty) return nullptr;
    }
  }
  std::size_t size() const { return size_; }
  /// Calls `each(left, right, merge)`.
  template <class F>
  void visit(F&& each) const {
    for (const Entry& e : table_)
      if (e.key != empty) each(static_cast<Symbol>(e.key >> 32), static_cast<Symbol>(e.key), e.merge);
  }

 private:
  static constexpr std::uint64_t empty = ~std::uint64_t{0};
  struct Entry {
    std::uint64_t key = empty;
    Merge merge{};
  };
  static std::uint64_t key_of(Symbol left, Symbol right) { return std::uint64_t{left} << 32 | right; }
  std::size_t slot(std::uint64_t key) const { return (key ^ key >> 29) * factor_ >> shift_; }
  Entry& place(std::uint64_t key);
  void grow();

  std::uint64_t factor_ = spreading_factor();
  std::size_t size_ = 0, mask_ = 63;
  int shift_ = 58;
  std::vector<Entry> table_ = std::vector<Entry>(64);
};

}  // namespace sherd::nn::tokens
