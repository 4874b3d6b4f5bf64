// Sums, averages and maxima across ranks, by the rule of `ReduceOp`; every transport uses this code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "collectives/collective.h"

namespace sherd {

/// Writes to `out` the `reduction` of `count` elements of every source, taken in the order of the list, which
/// is rank order. `out` may be one of the sources. The bits do not depend on threads or transport.
void combine(DType dtype, ReduceOp reduction, std::span<const std::byte* const> sources, std::byte* out,
             std::int64_t count);

/// Copies bytes with this rank's threads; nothing where `to` is `from`.
void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes);

}  // namespace sherd
