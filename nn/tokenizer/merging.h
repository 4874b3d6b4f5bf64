// Merging the symbols of a word, the best pair first, the leftmost of equals.
#pragma once

#include <cstdint>
#include <vector>

#include "nn/tokenizer/merges.h"

namespace sherd::nn::tokens {

/// Memory that words share; for one thread at a time.
class Merging {
 public:
  /// Merges what can be merged in `symbols`, in time n log n.
  void run(const Merges& merges, std::vector<Symbol>& symbols);

 private:
  static constexpr std::size_t few = 32;
  static constexpr std::uint32_t never = ~std::uint32_t{0};
  void run_few(const Merges& merges, std::vector<Symbol>& symbols);
  void run_many(const Merges& merges, std::vector<Symbol>& symbols);
  /// Asks for the merge of the symbol at `at` with the next one.
  void ask(const Merges& merges, const std::vector<Symbol>& symbols, std::uint32_t at);

  std::vector<Merge> pairs_;  // of each symbol with the next; of rank `never` where there is none
  std::vector<std::uint32_t> next_, previous_;
  std::vector<std::uint64_t> heap_;  // rank and place
};

}  // namespace sherd::nn::tokens
