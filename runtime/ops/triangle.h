// What lies on one side of a diagonal.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// Of the matrices in the last two axes: the elements whose column - row is at most `offset`, or at least
/// where not `lower`; zeros elsewhere.
struct Triangle {
  static constexpr std::string_view name = "triangle";
  static constexpr Mask dense = 1;
  static constexpr Reads reads{};
  std::int64_t offset = 0;
  bool lower = true;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("offset", offset);
    on("lower", lower);
  }
  bool operator==(const Triangle&) const = default;
};

}  // namespace sherd::ops
