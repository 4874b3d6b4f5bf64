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

/// Computes one row: `n` elements of the output from as many of each input, one behind another in memory; of
/// an input whose step is 0 from the one element that is there. The steps of all others are 1.
using Row = void (*)(const void* functor, std::int64_t n, std::byte* const* at, const std::int64_t* steps);

/// A row and what it wants to be given.
struct Loop {
  Row row;
  Mask numbers;  ///< operands of which one may have the step 0
  bool in_f32;   ///< f32 where an operand is f16 or bf16; an output of theirs is rounded once
};

/// The largest functor, in bytes, and its alignment, that whoever takes a loop may copy.
inline constexpr std::size_t largest_functor = 64, functor_alignment = 16;

/// Whoever is given a loop and the functor that goes with it, which lives until `take` returns. `bytes`: of
/// one that may be copied byte by byte; 0 of others.
class LoopTaker {
 public:
  virtual void take(const Loop& loop, const void* functor, std::size_t bytes) const = 0;

 protected:
  ~LoopTaker() = default;
};
/// Gives the loop of an op, `op` as its kernel has it, on inputs of `dtype` (the last one's).
using LoopOf = void (*)(const void* op, DType dtype, const LoopTaker& taker);
/// The loops of the ops of a row of kernels, for who runs several of them over one row: null where they have
/// none, or the CPU's kernel is no longer the one that `add_loop` found there.
SHERD_API LoopOf loop_of(const KernelRow& row);
SHERD_API void add_loop(const KernelRow& row, LoopOf loop, bool light);

/// Runs what it takes over the operands.
class SHERD_API RunsRows final : public LoopTaker {
 public:
  explicit RunsRows(const Operands& operands) : operands_(operands) {}
  void take(const Loop& loop, const void* functor, std::size_t bytes) const override;

 private:
  const Operands& operands_;
};

/// Calls `loop` for all rows of a call on the CPU, long ones cut into fixed tiles that threads share.
/// Operands that lie otherwise than the loop wants go through blocks that stay in the nearest cache.
SHERD_API void run_rows(const Operands& w, const Loop& loop, const void* functor);

}  // namespace sherd::detail
