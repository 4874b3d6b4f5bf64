#include "nn/tokenizer/merges.h"

#include <utility>

namespace sherd::nn::tokens {

Merges::Entry& Merges::place(std::uint64_t key) {
  std::size_t at = slot(key);
  while (table_[at].key != key && table_[at].key != empty) at = (at + 1) & mask_;
  return table_[at];
}

void Merges::set(Symbol left, Symbol right, Merge merge) {
  if (5 * (size_ + 1) > 4 * table_.size()) grow();
  Entry& entry = place(key_of(left, right));
  if (entry.key == empty) ++size_;
  entry = {key_of(left, right), merge};
}

void Merges::grow() {
  const std::vector<Entry> before = std::exchange(table_, std::vector<Entry>(2 * table_.size()));
  mask_ = table_.size() - 1;
  --shift_;
  for (const Entry& e : before)
    if (e.key != empty) place(e.key) = e;
}

}  // namespace sherd::nn::tokens
