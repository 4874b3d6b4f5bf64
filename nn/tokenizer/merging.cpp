#include "nn/tokenizer/merging.h"

#include <algorithm>
#include <functional>

namespace sherd::nn::tokens {

void Merging::run(const Merges& merges, std::vector<Symbol>& symbols) {
  if (symbols.size() < 2) return;
  if (symbols.size() <= few)
    run_few(merges, symbols);
  else
    run_many(merges, symbols);
}

/// Looks at all pairs each time, which takes less than a heap while they are few.
void Merging::run_few(const Merges& merges, std::vector<Symbol>& symbols) {
  std::size_t count = symbols.size() - 1;
  const auto pair_at = [&](std::size_t at) {
    const Merge* merge = merges.find(symbols[at], symbols[at + 1]);
    return merge ? *merge : Merge{never, 0};
  };
  pairs_.resize(count);
  for (std::size_t at = 0; at < count; ++at) pairs_[at] = pair_at(at);
  while (count > 0) {
    std::size_t best = 0;
    for (std::size_t at = 1; at < count; ++at)
      if (pairs_[at].rank < pairs_[best].rank) best = at;
    if (pairs_[best].rank == never) break;
    symbols[best] = pairs_[best].result;
    std::copy(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 2,
              symbols.begin() + static_cast<std::ptrdiff_t>(count) + 1,
              symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    std::copy(pairs_.begin() + static_cast<std::ptrdiff_t>(best) + 1,
              pairs_.begin() + static_cast<std::ptrdiff_t>(count),
              pairs_.begin() + static_cast<std::ptrdiff_t>(best));
    --count;
    if (best > 0) pairs_[best - 1] = pair_at(best - 1);
    if (best < count) pairs_[best] = pair_at(best);
  }
  symbols.resize(count + 1);
}

void Merging::ask(const Merges& merges, const std::vector<Symbol>& symbols, std::uint32_t at) {
  pairs_[at].rank = never;
  if (next_[at] == never) return;
  const Merge* merge = merges.find(symbols[at], symbols[next_[at]]);
  if (merge == nullptr) return;
  pairs_[at] = *merge;
  heap_.push_back(std::uint64_t{merge->rank} << 32 | at);
}

void Merging::run_many(const Merges& merges, std::vector<Symbol>& symbols) {
  const auto count = static_cast<std::uint32_t>(symbols.size());
  pairs_.assign(count, {never, 0});
  next_.resize(count);
  previous_.resize(count);
  heap_.clear();
  for (std::uint32_t at = 0; at < count; ++at) {
    next_[at] = at + 1 < count ? at + 1 : never;
    previous_[at] = at > 0 ? at - 1 : never;
  }
  for (std::uint32_t at = 0; at < count; ++at) ask(merges, symbols, at);
  std::ranges::make_heap(heap_, std::greater<>());
  const auto ask_later = [&](std::uint32_t at) {
    const std::size_t before = heap_.size();
    ask(merges, symbols, at);
    if (heap_.size() > before) std::ranges::push_heap(heap_, std::greater<>());
  };
  while (!heap_.empty()) {
    std::ranges::pop_heap(heap_, std::greater<>());
    const auto at = static_cast<std::uint32_t>(heap_.back());
    const auto rank = static_cast<std::uint32_t>(heap_.back() >> 32);
    heap_.pop_back();
    if (pairs_[at].rank != rank) continue;  // one of the two has merged with another
    const std::uint32_t right = next_[at];
    symbols[at] = pairs_[at].result;
    pairs_[right].rank = never;
    next_[at] = next_[right];
    if (next_[at] != never) previous_[next_[at]] = at;
    if (previous_[at] != never) ask_later(previous_[at]);
    ask_later(at);
  }
  std::size_t left = 0;
  for (std::uint32_t at = 0; at != never; at = next_[at]) symbols[left++] = symbols[at];
  symbols.resize(left);
}

}  // namespace sherd::nn::tokens
