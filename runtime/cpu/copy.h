// Strided copies between any two dtypes.
#pragma once

#include <cstdint>
#include <span>

#include "runtime/cpu/operands.h"
#include "runtime/dtype.h"

namespace sherd::cpu {

/// to[i...] = from[i...] over `sizes`, strides in elements (0 in `from` broadcasts; `to` must not overlap
/// itself or `from`). At most 8 dimensions. Floats become integers by truncation, anything but 0 becomes
/// true. Large copies run in parallel.
void copy(std::span<const std::int64_t> sizes, DType from_dtype, const void* from,
          std::span<const std::int64_t> from_strides, DType to_dtype, void* to,
          std::span<const std::int64_t> to_strides);

/// A row of elements of one dtype as those of another, by the same rules.
sherd::detail::Row conversion(DType from, DType to);

}  // namespace sherd::cpu
