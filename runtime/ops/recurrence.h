// Running sums and products along the last axis, as one recurrence.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// h[i] = a[i] h[i - 1] + b[i] along the last axis, from h[-1] = 0; backwards, from the end, if `reverse`.
/// Inputs: b, and a of the same shape or none, which means ones. Its gradient is the recurrence the other
/// way.
struct Recurrence {
  static constexpr std::string_view name = "recurrence";
  static constexpr Arity arity = 2;
  static constexpr Mask optional = 0b10;
  static constexpr Mask dense = 0b11;
  bool reverse = false;

  Specs infer(SpecSpan in) const;
  Reads reads(Mask needs) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { on("reverse", reverse); }
  bool operator==(const Recurrence&) const = default;
};

/// The product of the elements up to each one of the last axis.
struct RunningProduct {
  static constexpr std::string_view name = "running_product";
  static constexpr Mask dense = 0b1;
  static constexpr Reads reads{.inputs = 1, .outputs = 1};

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  bool operator==(const RunningProduct&) const = default;
};

}  // namespace sherd::ops
