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

/// Along the last axis: x[..., index[..., j]] at j.
struct Gather {
  static constexpr std::string_view name = "gather";
  static constexpr Arity arity = 2;
  static constexpr Mask dense = 0b11;
  static constexpr Reads reads{.inputs = 0b10};
  std::string_view call = "gather";  ///< what messages name

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  bool operator==(const Gather&) const = default;
};

/// The inverse: inputs are values and their positions along the last axis of `columns` elements; other places
/// are zero, repeated positions add up in order.
struct Scatter {
  static constexpr std::string_view name = "scatter";
  static constexpr Arity arity = 2;
  static constexpr Mask dense = 0b11;
  static constexpr Reads reads{.inputs = 0b10};
  std::int64_t columns = 0;
  std::string_view call = "scatter";  ///< what messages name
  bool distinct = false;              ///< the positions of a row are known to differ

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    on("columns", columns);
    on("distinct", distinct);
  }
  bool operator==(const Scatter&) const = default;
};

}  // namespace sherd::ops
