// Evenly spaced numbers.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// start + i step.
struct Arange {
  static constexpr std::string_view name = "arange";
  static constexpr Arity arity = 0;
  static constexpr bool differentiable = false;
  Spec spec;
  Number start = 0, step = 1;

  Specs infer(SpecSpan) const {
    if (!is_floating(spec.dtype)) detail::check_fits(name, "step", step, DType::i64);
    return {spec};
  }
  void fields(auto&& on) const {
    on("start", start);
    on("step", fmt::format("{}", step));  // not an element: 5, 4, 3 fits u8, and -1 does not
  }
  bool operator==(const Arange&) const = default;
};

}  // namespace sherd::ops
