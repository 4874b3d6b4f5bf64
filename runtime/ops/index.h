// Writing parts of a tensor.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// Writes input 1 into a box of input 0: along axis i its elements start[i], start[i] + step[i], ..., size[i]
/// of them. Shapes are the box's, and dtypes the same.
struct WriteBox {
  static constexpr std::string_view name = "write_box_";
  static constexpr Arity arity = 2;
  static constexpr Mask mutates = 1;
  static constexpr Reads reads{};
  Shape start, step, size;

  Specs infer(SpecSpan in) const;
  void run(Inputs in, Outputs out) const;  // a copy into a view
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    on("start", start);
    on("step", step);
    on("size", size);
  }
  /// The box of `x` as recorded slices.
  Tensor box_in(Tensor x) const;
  bool operator==(const WriteBox&) const = default;
};

/// Inputs: positions (i64, of one shape) along each axis of `sizes`, from the end where they are negative.
/// Output: the numbers of the elements there, in row-major order; ValueError for a position outside its axis.
struct ElementNumbers {
  static constexpr std::string_view name = "element_numbers";
  static constexpr Arity arity = Arity::at_least(1);
  static constexpr Mask dense = all_of_them;
  static constexpr bool differentiable = false;
  Shape sizes;
  std::string_view call = "element_numbers";  ///< a literal: what messages name

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { on("sizes", sizes); }
  bool operator==(const ElementNumbers&) const = default;
};

/// Where a bool tensor holds, in row-major order: `count` numbers of elements, as many as there are.
struct Places {
  static constexpr std::string_view name = "places";
  static constexpr Mask dense = 1;
  static constexpr bool differentiable = false;
  std::int64_t count = 0;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { on("count", count); }
  bool operator==(const Places&) const = default;
};

/// Writes input 2, 0-d, over the elements of input 0 where the bool input 1, which broadcasts to it, holds.
struct FillWhere {
  static constexpr std::string_view name = "masked_fill_";
  static constexpr Arity arity = 3;
  static constexpr Mask mutates = 1;
  static constexpr Reads reads{.inputs = 0b010};

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const;
  bool operator==(const FillWhere&) const = default;
};

}  // namespace sherd::ops

namespace sherd::detail {

/// Where `x` is not zero, in row-major order: 1-D, on its device. How many there are the host has to know.
/// `call` opens the DeviceError on `meta`.
Tensor places_where(std::string_view call, const Tensor& x);

}  // namespace sherd::detail
