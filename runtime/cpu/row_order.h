// The order of a row's elements: larger first, NaN as the largest, equal ones by position.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "runtime/half.h"

namespace sherd::cpu {

namespace row_order {

template <std::size_t bytes>
using UnsignedOf =
    std::conditional_t<bytes == 1, std::uint8_t,
                       std::conditional_t<bytes == 2, std::uint16_t,
                                          std::conditional_t<bytes == 4, std::uint32_t, std::uint64_t>>>;

/// Smaller for what comes first.
template <class T>
UnsignedOf<sizeof(T)> key_of(T x) {
  using Key = UnsignedOf<sizeof(T)>;
  constexpr Key sign = static_cast<Key>(Key(1) << (8 * sizeof(T) - 1));
  if constexpr (std::is_same_v<T, bool>) {
    return !x;
  } else if constexpr (std::is_integral_v<T>) {
    const Key bits = static_cast<Key>(std::is_signed_v<T> ? static_cast<Key>(x) ^ sign : x);
    return static_cast<Key>(~bits);
  } else {
    const auto bits = std::bit_cast<Key>(x);
    constexpr Key infinite = static_cast<Key>(std::is_same_v<T, double>     ? 0x7FF0000000000000
                                              : std::is_same_v<T, float>    ? 0x7F800000
                                              : std::is_same_v<T, BFloat16> ? 0x7F80
                                                                            : 0x7C00);
    const Key magnitude = static_cast<Key>(bits & ~sign);
    if (magnitude > infinite) return 0;
    // Both zeros are one number.
    const bool negative = (bits & sign) != 0 && magnitude != 0;
    return negative ? bits : static_cast<Key>(~(magnitude | sign));
  }
}

__extension__ using Wide = unsigned __int128;

}  // namespace row_order

/// Finds the first places of rows. A word holds an element's key above its position, so that no two are equal
/// and to compare elements is to compare words.
template <class T, class Word>
class RowOrder {
 public:
  /// The position of what comes at place `i`; of the last `find`.
  std::int64_t operator[](std::size_t i) const { return static_cast<std::int64_t>(words_[i] & positions); }
  /// Puts the first `k` places of `row` in order.
  void find(const T* row, std::int64_t columns, std::int64_t k) {
    words_.resize(static_cast<std::size_t>(columns));
    for (std::int64_t j = 0; j < columns; ++j)
      words_[static_cast<std::size_t>(j)] =
          (static_cast<Word>(row_order::key_of(row[j])) << shift) | static_cast<Word>(j);
    if (k <= columns / 8)  // a heap of most elements costs more than an order of all
      std::partial_sort(words_.begin(), words_.begin() + k, words_.end());
    else if (columns < least_by_digits)
      std::sort(words_.begin(), words_.end());
    else
      sort_by_digits();
  }

 private:
  static constexpr int shift = sizeof(Word) * 4;
  static constexpr Word positions = (Word(1) << shift) - 1;
  static constexpr std::int64_t least_by_digits = 512;
  static constexpr std::size_t digits = sizeof(T), values = 256;

  static std::size_t digit(Word word, std::size_t d) {
    return static_cast<std::size_t>(word >> (shift + 8 * static_cast<int>(d))) % values;
  }
  /// From the lowest digit of the keys on, each pass keeping the order of the one before it.
  void sort_by_digits() {
    std::array<std::array<std::size_t, values>, digits> counts{};
    std::array<std::array<std::size_t, values>, digits> begins;
    for (const Word word : words_)
      for (std::size_t d = 0; d < digits; ++d) ++counts[d][digit(word, d)];
    other_.resize(words_.size());
    for (std::size_t d = 0; d < digits; ++d) {
      if (counts[d][digit(words_[0], d)] == words_.size()) continue;  // all have the same
      std::size_t at = 0;
      for (std::size_t v = 0; v < values; at += counts[d][v++]) begins[d][v] = at;
      for (const Word word : words_) other_[begins[d][digit(word, d)]++] = word;
      words_.swap(other_);
    }
  }

  std::vector<Word> words_, other_;
};

}  // namespace sherd::cpu
