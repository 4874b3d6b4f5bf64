// The largest elements along the last axis.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// Outputs: values and their i64 positions, largest first; equal values by position, NaN largest of all.
struct TopK {
  static constexpr std::string_view name = "topk";
  static constexpr Mask dense = 1;
  static constexpr Reads reads{.outputs = 0b10};
  std::int64_t k = 1;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const { on("k", k); }
  bool operator==(const TopK&) const = default;
};

}  // namespace sherd::ops
