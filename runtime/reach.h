// Where in its storage a view lies.
#pragma once

#include <cstdint>
#include <optional>

#include "runtime/tensor.h"

namespace sherd {

/// The first and last element of its storage that a view touches. The view has elements.
struct Reach {
  std::int64_t low, high;

  /// Empty where they do not fit 64 bits; never of a tensor that exists.
  static std::optional<Reach> of(const Layout& layout) {
    Reach reach{layout.offset, layout.offset};
    for (int i = 0; i < layout.shape.rank(); ++i) {
      std::int64_t way = 0;
      if (__builtin_mul_overflow(layout.shape[i] - 1, layout.strides[i], &way)) return {};
      std::int64_t& end = way < 0 ? reach.low : reach.high;
      if (__builtin_add_overflow(end, way, &end)) return {};
    }
    return reach;
  }
};

/// Whether a view shows an element in more than one place, as expanded ones do, so that it cannot be written.
inline bool shows_twice(const Layout& layout) {
  for (int i = 0; i < layout.shape.rank(); ++i)
    if (layout.strides[i] == 0 && layout.shape[i] > 1) return true;
  return false;
}

}  // namespace sherd
