// The sum of one row.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/dtype.h"

namespace sherd::cpu {

/// The sum of `n` floats at `x`, one behind another, over `divisor`, written to `out`: to the bit what `sum`
/// gives for each of many short rows.
using SumOfRow = void (*)(const std::byte* x, std::int64_t n, double divisor, std::byte* out);
SumOfRow sum_of_row(DType dtype);

}  // namespace sherd::cpu
