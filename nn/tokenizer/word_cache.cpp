#include "nn/tokenizer/word_cache.h"

#include <utility>

namespace sherd::nn::tokens {

std::optional<std::span<const Id>> WordCache::find(std::string_view word, std::uint64_t hash) const {
  const std::size_t mask = table_.size() - 1;
  for (std::size_t at = hash & mask; table_[at].bytes != 0; at = (at + 1) & mask) {
    const Entry& e = table_[at];
    if (e.hash == hash && std::string_view(words_).substr(e.word, e.bytes) == word)
      return std::span(ids_).subspan(e.ids, e.count);
  }
  return {};
}

void WordCache::put(std::string_view word, std::uint64_t hash, std::span<const Id> ids) {
  if (2 * (size_ + 1) > table_.size()) grow();
  const std::size_t mask = table_.size() - 1;
  std::size_t at = hash & mask;
  while (table_[at].bytes != 0) at = (at + 1) & mask;
  table_[at] = {hash, static_cast<std::uint32_t>(words_.size()), static_cast<std::uint32_t>(ids_.size()),
                static_cast<std::uint32_t>(word.size()), static_cast<std::uint32_t>(ids.size())};
  words_.append(word);
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  ++size_;
}

void WordCache::grow() {
  if (size_ >= most_words) {
    table_.assign(table_.size(), {});
    words_.clear();
    ids_.clear();
    size_ = 0;
    return;
  }
  const std::vector<Entry> before = std::exchange(table_, std::vector<Entry>(2 * table_.size()));
  const std::size_t mask = table_.size() - 1;
  for (const Entry& e : before) {
    if (e.bytes == 0) continue;
    std::size_t at = e.hash & mask;
    while (table_[at].bytes != 0) at = (at + 1) & mask;
    table_[at] = e;
  }
}

}  // namespace sherd::nn::tokens
