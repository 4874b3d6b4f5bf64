// Recurrent layers along a sequence: what all steps are from what the input gives to each.
#pragma once

#include "runtime/op.h"
#include "runtime/ops/recurrent_cells.h"

namespace sherd::ops {

/// Inputs: x (T, B, gates H), W (gates H, H), b (gates H), the first h (B, H), the first c (B, H) or none.
/// Outputs: h of each step (T, B, H), c of each step (none has no elements), and for the gradient s(i), s(f),
/// tanh(g), s(o) of an LSTM and s(r), s(z), n, m_n of a GRU (T, B, 4 H).
struct Recurrent {
  static constexpr std::string_view name = "recurrent";
  static constexpr Arity arity = 5;
  static constexpr Mask optional = 0b10000;
  static constexpr Mask dense = 0b11111;
  static constexpr Reads reads{.inputs = 0b11111, .outputs = 0b111};
  RecurrentCell cell = RecurrentCell::tanh;
  bool reverse = false;  ///< from the last step to the first

  std::int64_t gates() const {
    return visit_cell(cell, [](auto of) { return decltype(of)::gates; });
  }
  bool has_cell() const {
    return visit_cell(cell, [](auto of) { return decltype(of)::has_cell; });
  }
  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("cell", static_cast<int>(cell));
    on("reverse", reverse);
  }
  bool operator==(const Recurrent&) const = default;
};

/// Inputs: gradients of h and of c or none, then W, the first h, the first c or none, and the outputs of the
/// forward. Outputs: gradients of x (T, B, gates H), of m, which differ in a GRU alone (else no elements), of
/// the first h and of the first c.
struct RecurrentGrad {
  static constexpr std::string_view name = "recurrent_grad";
  static constexpr Arity arity = 8;
  static constexpr Mask optional = 0b10011;
  static constexpr Mask dense = 0b11111111;
  static constexpr bool differentiable = false;
  Recurrent of;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { of.fields(on); }
  bool operator==(const RecurrentGrad&) const = default;
};

/// Outputs of the recurrence of `cell`: h and, of an LSTM, c of each step.
struct RecurrentSteps {
  Tensor hidden, cells;
};
SHERD_API RecurrentSteps recurrent(const Recurrent& op, const Tensor& x, const Tensor& weight,
                                   const Tensor& bias, const Tensor& hidden, const Tensor& cell);

}  // namespace sherd::ops
