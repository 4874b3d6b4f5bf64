// Axes in another order.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// Output axis i is input axis axes[i].
struct Permute {
  static constexpr std::string_view name = "permute";
  static constexpr Reads reads{};
  Shape axes;

  Layout view(const Tensor& x) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const { on("axes", axes); }
  bool operator==(const Permute&) const = default;
};

}  // namespace sherd::ops
