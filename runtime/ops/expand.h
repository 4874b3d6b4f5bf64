// Size-1 axes repeated without copying.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

struct Expand {
  static constexpr std::string_view name = "expand";
  static constexpr Reads reads{};
  Shape shape;

  Layout view(const Tensor& x) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const { on("shape", shape); }
  bool operator==(const Expand&) const = default;
};

}  // namespace sherd::ops
