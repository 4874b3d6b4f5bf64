#include "nn/tokenizer/vocabulary.h"

#include "nn/tokenizer/hash.h"

namespace sherd::nn::tokens {

std::size_t Vocabulary::slot(std::string_view text) const {
  const std::size_t mask = table_.size() - 1;
  std::size_t at = hash_of(text) & mask;
  while (table_[at] != none && this->text(entries_[table_[at]]) != text) at = (at + 1) & mask;
  return at;
}

bool Vocabulary::add(std::string_view text, Id id) {
  if (has(id)) return false;
  if (table_.size() < 2 * (entries_.size() + 1)) grow();
  const std::size_t at = slot(text);
  if (table_[at] != none) return false;
  const auto entry = static_cast<std::uint32_t>(entries_.size());
  table_[at] = entry;
  entries_.push_back(
      {static_cast<std::uint32_t>(texts_.size()), static_cast<std::uint32_t>(text.size()), id});
  texts_.append(text);
  if (places_.size() <= id) places_.resize(id + 1, none);
  places_[id] = entry;
  return true;
}

void Vocabulary::grow() {
  table_.assign(table_.empty() ? 64 : 2 * table_.size(), none);
  for (std::uint32_t entry = 0; entry < entries_.size(); ++entry) table_[slot(text(entries_[entry]))] = entry;
}

std::optional<Id> Vocabulary::find(std::string_view text) const {
  if (table_.empty()) return {};
  const std::uint32_t entry = table_[slot(text)];
  return entry == none ? std::optional<Id>() : entries_[entry].id;
}

std::string_view Vocabulary::text(Id id) const {
  return has(id) ? text(entries_[places_[id]]) : std::string_view();
}

}  // namespace sherd::nn::tokens
