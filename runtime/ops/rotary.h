// Rotary position embedding (Su et al., 2021).
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// What a pair's share of the full speed goes by: its turns in `original` positions, or its number.
enum class RotaryMeasure { turns, pair };

/// Cosines and sines by which pairs turn, times `amplitude`: outputs of `spec`, (T, D / 2), of pair i at step
/// t those of (first + t) base^(-2 i / D). Where factor is not 1, pairs whose measure is at `high` turn so,
/// those at `low` are slowed by `factor`, between them it is a mixture, and beyond them as at the nearer one.
struct RotaryTable {
  static constexpr std::string_view name = "rotary_table";
  static constexpr Arity arity = 0;
  static constexpr bool differentiable = false;
  Spec spec;
  std::int64_t first = 0;
  double base = 10000, factor = 1, low = 1, high = 4, original = 8192;
  RotaryMeasure measure = RotaryMeasure::turns;
  double amplitude = 1;

  Specs infer(SpecSpan) const { return {spec, spec}; }
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("first", first);
    on("base", base);
    on("factor", factor);
    on("low", low);
    on("high", high);
    on("original", original);
    on("by_pair", measure == RotaryMeasure::pair);
    on("amplitude", amplitude);
  }
  bool operator==(const RotaryTable&) const = default;
};

/// Inputs: x (..., T, Q, D), any strides; cosines and sines (T, D / 2) in the dtype that x is computed in.
/// Pairs of features, i and i + D / 2 or else neighbours, turned by the angle of their step, or `back`.
struct Rotary {
  static constexpr std::string_view name = "rotary";
  static constexpr Arity arity = 3;
  static constexpr Mask dense = 0b110;
  static constexpr Reads reads{.inputs = 0b110};
  bool neighbours = false, back = false;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("neighbours", neighbours);
    on("back", back);
  }
  bool operator==(const Rotary&) const = default;
};

}  // namespace sherd::ops
