// Tensors joined along an axis.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

struct Cat {
  static constexpr std::string_view name = "cat";
  static constexpr Arity arity = Arity::at_least(1);
  static constexpr Reads reads{};
  int axis = 0;

  Specs infer(SpecSpan in) const;
  void run(Inputs in, Outputs out) const;  // copies into parts of the output
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const { on("axis", axis); }
  bool operator==(const Cat&) const = default;
};

/// The elements along `axis` moved by `by` places, 0 <= by < their number, the last ones to the front.
struct Roll {
  static constexpr std::string_view name = "roll";
  static constexpr Reads reads{};
  int axis = 0;
  std::int64_t by = 0;

  Specs infer(SpecSpan in) const { return {in[0]}; }
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    on("axis", axis);
    on("by", by);
  }
  bool operator==(const Roll&) const = default;
};

}  // namespace sherd::ops
