// How the operands of one call lie in memory, over the dimensions that they share.
#pragma once

#include <cstddef>
#include <cstdint>

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

}  // namespace sherd::detail
