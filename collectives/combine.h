// The one rule for sums, averages and maxima across ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "collectives/collective.h"

namespace sherd {

/// Writes to `out` the `reduction` of `count` elements of every source, taken in the order of the list (rank
/// order). `out` may be one of the sources. Bits depend on nothing but the values.
void combine(DType dtype, ReduceOp reduction, std::span<const std::byte* const> sources, std::byte* out,
             std::int64_t count);

/// Copies bytes with this rank's threads; nothing happens when both are the same.
void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes);

}  // namespace sherd
