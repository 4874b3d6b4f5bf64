// The order of a row's elements: larger first, NaN as the largest, equal ones by position.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "runtime/cpu/simd.h"
#include "runtime/half.h"

namespace sherd::cpu {

namespace row_order {

template <std::size_t bytes>
using UnsignedOf =
    std::conditional_t<bytes == 1, std::uint8_t,
                       std::conditional_t<bytes == 2, std::uint16_t,
                                          std::conditional_t<bytes == 4, std::uint32_t, std::uint64_t>>>;

/// Smaller for what comes first, of the bits of floats `T`: of one, or of a vector of them.
template <class T, class Bits>
Bits key_of_float(Bits bits) {
  using Key = UnsignedOf<sizeof(T)>;
  constexpr Key infinite = static_cast<Key>(std::is_same_v<T, double>     ? 0x7FF0000000000000
                                            : std::is_same_v<T, float>    ? 0x7F800000
                                            : std::is_same_v<T, BFloat16> ? 0x7F80
                                                                          : 0x7C00);
  const Bits zero{}, least = static_cast<Bits>(zero + static_cast<Key>(Key(1) << (8 * sizeof(T) - 1))),
                     rest = static_cast<Bits>(~least), largest = static_cast<Bits>(zero + infinite);
  const Bits one_zero = bits == least ? zero : bits;  // both are one number
  const Bits key = one_zero >= least ? one_zero : static_cast<Bits>(one_zero ^ rest);
  return static_cast<Bits>(bits & rest) > largest ? zero : key;
}

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
    return key_of_float<T>(std::bit_cast<Key>(x));
  }
}

/// Of a vector's worth of elements.
template <class T>
std::array<UnsignedOf<sizeof(T)>, 64 / sizeof(T)> keys_of(const std::array<T, 64 / sizeof(T)>& x) {
  using Key = UnsignedOf<sizeof(T)>;
  std::array<Key, 64 / sizeof(T)> keys;
  if constexpr (std::is_integral_v<T>)
    std::ranges::transform(x, keys.begin(), [](T one) { return key_of(one); });
  else
    store(keys.data(), key_of_float<T>(std::bit_cast<Vec<Key>>(x)));
  return keys;
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
    if (k <= lanes<Key> && k <= columns / 8) return find_few(row, columns, k);
    words_.resize(static_cast<std::size_t>(columns));
    for (std::int64_t j = 0; j < columns; ++j)
      words_[static_cast<std::size_t>(j)] = word_of(row_order::key_of(row[j]), j);
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
  using Key = row_order::UnsignedOf<sizeof(T)>;
  static constexpr Key last_key = static_cast<Key>(~Key(0));

  static Word word_of(Key key, std::int64_t position) {
    return (static_cast<Word>(key) << shift) | static_cast<Word>(position);
  }

  /// Of the keys that are the first in their lane the `k`-th has at least `k` at or before it in the row, and
  /// seldom many: only those are ordered.
  void find_few(const T* row, std::int64_t columns, std::int64_t k) {
    keys_.resize(static_cast<std::size_t>((columns + lanes<Key> - 1) / lanes<Key>));
    Vec<Key> firsts = splat(last_key);
    for (std::int64_t j = 0; j < columns; j += lanes<Key>) {
      const Vec<Key> keys = keys_at(row + j, std::min<std::int64_t>(lanes<Key>, columns - j));
      keys_[static_cast<std::size_t>(j / lanes<Key>)] = keys;
      firsts = keys < firsts ? keys : firsts;
    }
    std::array<Key, lanes<Key>> ordered;
    store(ordered.data(), firsts);
    std::nth_element(ordered.begin(), ordered.begin() + (k - 1), ordered.end());
    const Key bound = ordered[static_cast<std::size_t>(k - 1)];
    words_.clear();
    for (std::size_t block = 0; block < keys_.size(); ++block) {
      if (!any(keys_[block] <= splat(bound))) continue;
      const std::int64_t first = static_cast<std::int64_t>(block) * lanes<Key>;
      for (std::int64_t i = 0; i < std::min<std::int64_t>(lanes<Key>, columns - first); ++i)
        if (keys_[block][i] <= bound) words_.push_back(word_of(keys_[block][i], first + i));
    }
    std::partial_sort(words_.begin(), words_.begin() + k, words_.end());
  }
  /// The keys of `count` elements, and behind them those that come last.
  static Vec<Key> keys_at(const T* row, std::int64_t count) {
    std::array<T, lanes<Key>> x{};
    std::memcpy(x.data(), row, static_cast<std::size_t>(count) * sizeof(T));
    std::array<Key, lanes<Key>> keys = row_order::keys_of(x);
    std::fill(keys.begin() + count, keys.end(), last_key);
    return load(keys.data());
  }

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
  std::vector<Vec<Key>> keys_;  // of a row
};

}  // namespace sherd::cpu
