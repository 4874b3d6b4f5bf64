// A linear layer's product with its bias, and with a residual stream, in one kernel.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// x (..., in), weight (out, in), bias (out) or none, residual (..., out) or none, which is added.
struct Linear {
  static constexpr std::string_view name = "linear";
  static constexpr Arity arity = 4;
  static constexpr Mask optional = 0b1100;
  static constexpr Mask dense = 0b100;

  static Reads reads(Mask needs) { return {((needs & 1) << 1) | ((needs >> 1) & 1), 0}; }
  static constexpr Peephole peephole{.takes_sums = 0b100};  // the bias's gradient
  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  bool operator==(const Linear&) const = default;
};

}  // namespace sherd::ops
