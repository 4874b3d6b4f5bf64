// Copies of the elements of one row, whatever they are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "runtime/cpu/element_bits.h"

namespace sherd::cpu {

/// Copies `n` elements of `size` bytes, steps counted in elements.
inline void copy_elements(std::int64_t size, const std::byte* from, std::int64_t from_step, std::byte* to,
                          std::int64_t to_step, std::int64_t n) {
  if (from_step == 1 && to_step == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(n * size));
    return;
  }
  with_bits(size, [&]<class T>(T element) {
    constexpr auto bytes = static_cast<std::int64_t>(sizeof(T));
    if (from_step == 0 && to_step == 1) {
      std::memcpy(&element, from, sizeof element);
      std::fill_n(reinterpret_cast<T*>(to), n, element);
      return;
    }
    for (std::int64_t i = 0; i < n; ++i)
      std::memcpy(to + i * to_step * bytes, from + i * from_step * bytes, sizeof(T));
  });
}

}  // namespace sherd::cpu
