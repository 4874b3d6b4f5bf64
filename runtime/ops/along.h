// Picking and writing elements along one axis by their positions.
#pragma once

#include "runtime/indexing.h"
#include "runtime/op.h"

namespace sherd::ops {

/// x[..., index[..., j, ...], ...] at j along `axis`; other axes of the index (i64) are as long as x's or
/// shorter.
struct GatherAlong {
  static constexpr std::string_view name = "gather_along";
  static constexpr Arity arity = 2;
  static constexpr Mask dense = 0b11;
  static constexpr Reads reads{.inputs = 0b10};
  int axis = 0;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const { on("axis", axis); }
  bool operator==(const GatherAlong&) const = default;
};

/// The inverse: input 0, or zeros of `shape` where it is not given, with values[..., j, ...] written or added
/// at index[..., j, ...]. Of repeated positions the last is written; all are added, 16-bit floats in f32.
struct ScatterAlong {
  static constexpr std::string_view name = "scatter_along";
  static constexpr Arity arity = 3;
  static constexpr Mask optional = 0b001;
  static constexpr Mask dense = 0b010;
  static constexpr Reads reads{.inputs = 0b010};
  int axis = 0;
  Put put = Put::replace;
  Shape shape{};

  std::string_view call() const { return put == Put::add ? "scatter_add" : "scatter"; }
  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    on("axis", axis);
    on("add", put == Put::add);
    on("shape", shape);
  }
  bool operator==(const ScatterAlong&) const = default;
};

}  // namespace sherd::ops
