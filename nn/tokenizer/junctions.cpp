#include "nn/tokenizer/junctions.h"

#include <utility>

namespace sherd::nn::tokens {

void Junctions::add(char32_t left, char32_t right) {
  if (left < 128 && right < 128) {
    ascii_.set(left << 7 | right);
    return;
  }
  if (has(left, right)) return;
  if (2 * (size_ + 1) > table_.size()) {
    const auto before = std::exchange(table_, std::vector<std::uint64_t>(2 * table_.size(), empty));
    --shift_;
    for (const std::uint64_t key : before)
      if (key != empty) insert(key);
  }
  insert(std::uint64_t{left} << 32 | right);
  ++size_;
}

void Junctions::insert(std::uint64_t key) {
  std::size_t at = key * factor_ >> shift_;
  while (table_[at] != empty) at = (at + 1) & (table_.size() - 1);
  table_[at] = key;
}

}  // namespace sherd::nn::tokens
