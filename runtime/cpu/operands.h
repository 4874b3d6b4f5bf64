// How the operands of one call lie in memory, over the dimensions that they share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/functor.h"
#include "runtime/kernel.h"
#include "runtime/shape.h"

namespace sherd::detail {

/// Output and inputs of one call, broadcast to one shape. Operand 0 is the output. Dimensions go from the
/// outermost to the innermost.
struct Operands {
  static constexpr int most = max_elementwise_inputs + 1;
  int count = 0, rank = 0;
  std::int64_t sizes[max_rank];
  std::int64_t strides[most][max_rank];  // in elements; 0 where broadcast
  std::byte* data[most];
  DType dtypes[most];

  std::int64_t inner() const { return rank == 0 ? 1 : sizes[rank - 1]; }
  std::int64_t outer() const {
    std::int64_t n = 1;
    for (int i = 0; i + 1 < rank; ++i) n *= sizes[i];
    return n;
  }
  std::int64_t step(int operand) const { return rank == 0 ? 0 : strides[operand][rank - 1]; }

  /// Drops dimensions of size 1 and merges neighbours over which every operand steps as over one.
  SHERD_API void collapse();
};

/// The operands of an elementwise call, collapsed. The tensors are on one device, whose memory is not read
/// here.
SHERD_API Operands operands_of(Inputs in, const Tensor& out);

/// Computes one row: `n` elements, operand k from `at[k]` in steps of `steps[k]` elements.
using Row = void (*)(const void* functor, std::int64_t n, std::byte* const* at, const std::int64_t* steps);

/// Calls `row` for all rows of a call on the CPU, long ones cut into fixed tiles that threads share.
SHERD_API void run_rows(const Operands& w, Row row, const void* functor);
/// The same for a row over f32: operands of f16 and bf16 are widened for it block by block, and what it gives
/// for an output of theirs is rounded once.
SHERD_API void run_rows_in_f32(const Operands& w, Row row, const void* functor);

}  // namespace sherd::detail
