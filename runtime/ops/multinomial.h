// Random draws by weight.
#pragma once

#include "runtime/generator.h"
#include "runtime/op.h"

namespace sherd::ops {

/// One i64 index along the last axis, with probability proportional to its weight: the first whose running
/// sum exceeds a uniform share of the total.
struct Multinomial {
  static constexpr std::string_view name = "multinomial";
  static constexpr Mask dense = 1;
  static constexpr bool differentiable = false;
  RandomKey key;

  Specs infer(SpecSpan in) const;
  void fields(auto&& on) const {
    on("seed", key.seed);
    on("offset", key.offset);
  }
  bool operator==(const Multinomial&) const = default;
};

}  // namespace sherd::ops
