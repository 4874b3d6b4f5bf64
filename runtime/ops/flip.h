// Axes turned round.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// `axes` are bits.
struct Flip {
  static constexpr std::string_view name = "flip";
  static constexpr Reads reads{};
  Mask axes = 0;

  Specs infer(SpecSpan in) const { return {in[0]}; }
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { on("axes", axes); }
  bool operator==(const Flip&) const = default;
};

}  // namespace sherd::ops
