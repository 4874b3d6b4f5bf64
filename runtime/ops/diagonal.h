// The diagonal of matrices, as a view.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// Elements (i, i + offset) of the matrices in axes `a` and `b`, or (i - offset, i) below 0, as the last
/// axis.
struct Diagonal {
  static constexpr std::string_view name = "diagonal";
  static constexpr Reads reads{};
  int a = 0, b = 1;
  std::int64_t offset = 0;

  Layout view(const Tensor& x) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    on("a", a);
    on("b", b);
    on("offset", offset);
  }
  bool operator==(const Diagonal&) const = default;
};

}  // namespace sherd::ops
