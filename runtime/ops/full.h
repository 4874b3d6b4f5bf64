// A tensor of one value.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

struct Full {
  static constexpr std::string_view name = "full";
  static constexpr Arity arity = 0;
  static constexpr bool differentiable = false;
  Spec spec;
  Number value = 0;

  Specs infer(SpecSpan) const { return {spec}; }
  void fields(auto&& on) const { on("value", value); }
  bool operator==(const Full&) const = default;
};

/// Writes one value everywhere.
struct Fill {
  static constexpr std::string_view name = "fill_";
  static constexpr Mask mutates = 1;
  static constexpr Reads reads{};
  Number value = 0;

  Specs infer(SpecSpan) const { return {}; }
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const;  // nothing of the old value is left: zero
  void fields(auto&& on) const { on("value", value); }
  bool operator==(const Fill&) const = default;
};

}  // namespace sherd::ops
