// Picking and putting elements and slices by their positions.
#pragma once

#include "runtime/indexing.h"
#include "runtime/op.h"

namespace sherd::ops {

/// What a position stands for: all of x at it along an axis, or one element of the line along the axis in
/// which the position itself lies.
enum class Of { slices, elements };

/// Inputs: x, positions i64 of any shape. Of slices the shape of the positions stands where the axis was, or
/// `axes` axes from it on, over whose elements positions count in row-major order. Of elements it is the
/// output's: x[..., index[..., j, ...], ...] at j; along other axes it is as long as x's or shorter.
struct Take {
  static constexpr std::string_view name = "take";
  static constexpr Arity arity = 2;
  static constexpr Mask dense = 0b11;
  static constexpr Reads reads{.inputs = 0b10};
  Of of = Of::slices;
  int axis = 0, axes = 1;
  bool distinct = false;                ///< the positions, of elements those of a line, are known to differ
  std::string_view call = "embedding";  ///< a literal: what messages name

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    on("elements", of == Of::elements);
    on("axis", axis);
    on("axes", axes);
    on("distinct", distinct);
  }
  bool operator==(const Take&) const = default;
};

/// The inverse: input 0, or zeros of `shape` where it is not given, with input 2 written or added at the
/// positions that are input 1. Of repeated positions the last is written; all are added in order, 16-bit
/// floats in f32.
struct PutAt {
  static constexpr std::string_view name = "put_at";
  static constexpr Arity arity = 3;
  static constexpr Mask optional = 0b001;
  static constexpr Mask dense = 0b010;
  static constexpr Reads reads{.inputs = 0b010};
  Of of = Of::slices;
  int axis = 0, axes = 1;
  Put put = Put::replace;
  Shape shape{};
  bool distinct = false;              ///< the positions, of elements those of a line, are known to differ
  std::string_view call = "scatter";  ///< a literal: what messages name
  bool checked = false;               ///< a `Take` has seen the positions, which are inside

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    on("elements", of == Of::elements);
    on("axis", axis);
    on("axes", axes);
    on("add", put == Put::add);
    on("shape", shape);
    on("distinct", distinct);
    on("checked", checked);
  }
  bool operator==(const PutAt&) const = default;
};

/// The form that writes input 0, whose shape is `op.shape`.
struct PutAtInPlace {
  static constexpr std::string_view name = "put_at_";
  static constexpr Arity arity = 3;
  static constexpr Mask mutates = 1;
  static constexpr Mask dense = 0b010;
  static constexpr Reads reads{.inputs = 0b010};
  PutAt op;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const { return op.grad(args); }
  void fields(auto&& on) const { op.fields(on); }
  bool operator==(const PutAtInPlace&) const = default;
};

/// Of a dense tensor of `shape` what lies around the axes that positions of slices count over.
struct SliceSizes {
  std::int64_t outer = 1, columns = 1, inner = 1;
  SliceSizes(const Shape& shape, int axis, int axes);
};

}  // namespace sherd::ops
