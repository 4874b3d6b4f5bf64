// Products.
#pragma once

#include "runtime/ops/sum.h"

namespace sherd::ops {

/// Over `axes`; integers and bool as i64.
struct Prod : OverAxes {
  static constexpr std::string_view name = "prod";
  static constexpr Reads reads{.inputs = 1};

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  bool operator==(const Prod&) const = default;
};

/// Inputs: gy (m), x (m, n). Output: the gradient of x, whose rows were multiplied; zeros are no exception.
struct ProdGrad {
  static constexpr std::string_view name = "prod_grad";
  static constexpr Arity arity = 2;
  static constexpr Mask dense = 0b11;
  static constexpr bool differentiable = false;

  Specs infer(SpecSpan in) const { return {in[1]}; }
  Tensors reference(Inputs in) const;
  bool operator==(const ProdGrad&) const = default;
};

}  // namespace sherd::ops
