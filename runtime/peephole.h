// What a gradient rule can save the backward pass around it, beside giving its gradient.
#pragma once

#include <span>

#include "runtime/forward.h"
#include "runtime/tensor.h"

namespace sherd {

/// What an op's gradient rule makes of what lies beside it in a pass, known before the pass walks: the op
/// says it as `static constexpr Peephole peephole`. Bits are of its inputs.
struct Peephole {
  Mask adds_gradients = 0;  ///< inputs for which the rule adds what their other uses gave (`so_far`)
  Reads overwrites{};       ///< kept values over which it may write its result, where they are `spare`
  Mask gives_sums = 0;      ///< the input of whose gradient it can give sums (`gx_sums`)
  Mask takes_sums = 0;      ///< it reads `gy_sums` where the gradient of one of these is wanted
  bool of_several = false;  ///< it stands for several rules: it is told which sums are kept in f32
};

/// What a pass gives a rule of what its op's peephole names.
struct PeepholeArgs {
  /// Of each input: what its other uses gave so far, or an empty handle. The rule returns the sum, which
  /// saves a pass over both.
  Inputs so_far{};
  /// Of the kept values, those whose memory nobody else will read.
  Reads spare{};
  /// Of the first output's gradient, its sums over all axes but the last, where its maker gave them; else
  /// empty.
  Tensor gy_sums{};
  /// Where the same sums of the gradient may go; null where nobody takes them.
  Tensor* gx_sums = nullptr;
  /// Bit i % 64 of word i / 64: what comes to input i, a leaf's, is summed in f32 and rounded at the end, by
  /// the pass. A rule that stands for several sums so what they give it, `so_far` first, and may return f32.
  std::span<const std::uint64_t> in_f32{};
  bool is_in_f32(std::size_t i) const {
    return i / 64 < in_f32.size() && ((in_f32[i / 64] >> (i % 64)) & 1) != 0;
  }
};

}  // namespace sherd
