// Random draws by weight.
#pragma once

#include "runtime/generator.h"
#include "runtime/op.h"

namespace sherd::ops {

/// One i64 index along the last axis, with probability proportional to its weight: the first whose running
/// sum exceeds a uniform share of the total, of 53 random bits.
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

/// `count` draws a row, in a last axis. With replacement, draw i of row r is what `Multinomial` draws for row
/// r count + i; without, the places of the largest w / q, largest first, for exponential q.
struct ManyDraws {
  static constexpr std::string_view name = "many_draws";
  static constexpr Mask dense = 1;
  static constexpr bool differentiable = false;
  std::int64_t count = 1;
  bool replace = true;
  RandomKey key;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("count", count);
    on("replace", replace);
    on("seed", key.seed);
    on("offset", key.offset);
  }
  bool operator==(const ManyDraws&) const = default;
};

}  // namespace sherd::ops
