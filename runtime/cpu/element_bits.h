// Elements as plain bits of their size.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"

namespace sherd::cpu {

/// Calls `f` with an integer of an element's size in bytes: for what moves elements and does not look at
/// them.
template <class F>
void with_bits(std::int64_t element_size, const F& f) {
  switch (element_size) {
    case 1:
      return f(std::uint8_t{});
    case 2:
      return f(std::uint16_t{});
    case 4:
      return f(std::uint32_t{});
    default:
      return f(std::uint64_t{});
  }
}

template <class F>
void with_bits(DType d, const F& f) {
  with_bits(size_of(d), f);
}

}  // namespace sherd::cpu
