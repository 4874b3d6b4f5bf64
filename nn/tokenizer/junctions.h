// Between which characters a merge may ever happen.
#pragma once

#include <bitset>
#include <cstdint>
#include <vector>

#include "nn/tokenizer/hash.h"

namespace sherd::nn::tokens {

/// Pairs of a character that ends the left part of a merge and one that begins its right part. Between two
/// others a text may be cut without another result, and short pieces are found in the cache.
class Junctions {
 public:
  void add(char32_t left, char32_t right);
  bool has(char32_t left, char32_t right) const {
    if (left < 128 && right < 128) return ascii_[left << 7 | right];
    const std::uint64_t key = std::uint64_t{left} << 32 | right;
    for (std::size_t at = key * factor_ >> shift_;; at = (at + 1) & (table_.size() - 1)) {
      if (table_[at] == key) return true;
      if (table_[at] == empty) return false;
    }
  }

 private:
  static constexpr std::uint64_t empty = ~std::uint64_t{0};
  void insert(std::uint64_t key);

  std::bitset<128 * 128> ascii_;
  std::uint64_t factor_ = spreading_factor();
  std::size_t size_ = 0;
  int shift_ = 58;
  std::vector<std::uint64_t> table_ = std::vector<std::uint64_t>(64, empty);
};

}  // namespace sherd::nn::tokens
