// Positions of elements and rows, which a kernel looks at before it follows them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string_view>

#include "runtime/error.h"
#include "runtime/parallel.h"

namespace sherd::cpu {

/// The first of `n` positions that is outside [0, size), or -1.
inline std::int64_t first_outside(const std::int64_t* at, std::int64_t n, std::int64_t size) {
  std::atomic<bool> outside = false;
  parallel_for(n, 1 << 16, [&](std::int64_t begin, std::int64_t end) {
    std::uint64_t most = 0;  // of which negative ones are; found by vectors
    for (std::int64_t i = begin; i < end; ++i) most = std::max(most, static_cast<std::uint64_t>(at[i]));
    if (most >= static_cast<std::uint64_t>(size)) outside = true;
  });
  if (!outside) return -1;
  std::int64_t i = 0;
  while (at[i] >= 0 && at[i] < size) ++i;
  return i;
}

/// ValueError, in the name of `call`, for the first of `n` positions that is outside [0, size).
inline void check_positions(std::string_view call, const std::int64_t* at, std::int64_t n,
                            std::int64_t size) {
  const std::int64_t bad = first_outside(at, n, size);
  check<ValueError>(bad < 0, "{}: index {} at position {} is outside [0, {})", call, bad < 0 ? 0 : at[bad],
                    bad, size);
}

}  // namespace sherd::cpu
