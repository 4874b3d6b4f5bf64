// Another shape over the same elements, where the strides allow it.
#pragma once

#include <optional>

#include "runtime/op.h"

namespace sherd::ops {

struct ViewAs {
  static constexpr std::string_view name = "view";
  static constexpr Reads reads{};
  Shape shape;

  Layout view(const Tensor& x) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const { on("shape", shape); }
  bool operator==(const ViewAs&) const = default;

  /// Strides of `shape` over x's elements, or nothing where a copy would be needed.
  static std::optional<Shape> strides_over(const Tensor& x, const Shape& shape);
};

}  // namespace sherd::ops
