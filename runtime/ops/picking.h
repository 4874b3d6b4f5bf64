// Picking and putting elements and slices by their positions.
#pragma once

#include "runtime/indexing.h"
#include "runtime/op.h"

namespace sherd::ops {

/// What a position stands for: all of x at it along an axis, or one element of the line along the axis in
/// which the position itself lies.
enum class Of { slices, elements };

/// What picking and putting say of their positions.
struct Picking {
  Of of = Of::slices;
  int axis = 0, axes = 1;
  bool distinct = false;            ///< the positions, of elements those of a line, are known to differ
  std::string_view call = "index";  ///< a literal: what messages name

  /// The shape of what lies at positions `index` of a tensor of `shape`.
  Shape picked(const Shape& shape, const Spec& index) const;
  void fields(auto&& on) const {
    on("elements", of == Of::elements);
    on("axis", axis);
    on("axes", axes);
    on("distinct", distinct);
  }
  bool operator==(const Picking&) const = default;
};

/// Inputs: x, positions i64 of any shape. Of slices the shape of the positions stands where the axis was, or
/// `axes` axes from it on, over whose elements positions count in row-major order. Of elements it is the
/// output's: x[..., index[..., j, ...], ...] at j; along other axes it is as long as x's or shorter.
struct Take : Picking {
  static constexpr std::string_view name = "take";
  static constexpr Arity arity = 2;
  static constexpr Mask dense = 0b11;
  static constexpr Reads reads{.inputs = 0b10};
  bool last = false;  ///< of picks from one place the last has what is there, and the others 0

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  /// For kernels without a form of their own: what `last` gives, of other picks and puts.
  Tensor last_in_ops(Inputs in) const;
  void fields(auto&& on) const {
    Picking::fields(on);
    on("last", last);
  }
  bool operator==(const Take&) const = default;
};

/// The inverse: input 0, or zeros of `shape` where it is not given, with input 2 written or added at the
/// positions that are input 1. Of repeated positions the last is written; all are added in order, 16-bit
/// floats in f32.
struct PutAt : Picking {
  static constexpr std::string_view name = "put_at";
  static constexpr Arity arity = 3;
  static constexpr Mask optional = 0b001;
  static constexpr Mask dense = 0b010;
  static constexpr Reads reads{.inputs = 0b010};
  Put put = Put::replace;
  Shape shape{};
  bool checked = false;  ///< a `Take` has seen the positions, which are inside

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    Picking::fields(on);
    on("add", put == Put::add);
    on("shape", shape);
    on("checked", checked);
  }
  bool operator==(const PutAt&) const = default;
};

/// Both gradients of a `PutAt` that replaces, for devices that have a kernel for them at once. Inputs: the
/// gradient of what it gave, and the positions. Outputs: the gradients of input 0 and of the values.
struct PutAtGrad : Picking {
  static constexpr std::string_view name = "put_at_grad";
  static constexpr Arity arity = 2;
  static constexpr Mask dense = 0b11;
  static constexpr bool differentiable = false;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  bool operator==(const PutAtGrad&) const = default;
};

/// The form that writes input 0, whose shape is `shape`.
struct PutAtInPlace : PutAt {
  static constexpr std::string_view name = "put_at_";
  static constexpr Mask optional = 0;
  static constexpr Mask mutates = 1;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  bool operator==(const PutAtInPlace&) const = default;
};

/// Of a dense tensor of `shape` what lies around the axes that positions of slices count over.
struct SliceSizes {
  std::int64_t outer = 1, columns = 1, inner = 1;
  SliceSizes(const Shape& shape, int axis, int axes);
};

/// Whether all elements of `values` are one.
bool is_one(const Tensor& values);

}  // namespace sherd::ops
