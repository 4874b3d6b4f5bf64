// Products of matrices, batched.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// op(A) op(B) for A (batch..., m, k) and B (batch..., k, n) with equal batch axes; the flags transpose the
/// last two axes. Integers wrap around in their dtype; not every device multiplies them.
struct MatMul {
  static constexpr std::string_view name = "matmul";
  static constexpr Arity arity = 2;
  bool transpose_a = false, transpose_b = false;

  static Reads reads(Mask needs) { return {((needs & 1) << 1) | ((needs >> 1) & 1), 0}; }
  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    on("transpose_a", transpose_a);
    on("transpose_b", transpose_b);
  }
  bool operator==(const MatMul&) const = default;
};

/// Throws the error that mixed operands of a product deserve.
void check_same_dtype(const Spec& a, const Spec& b);

/// Rows of a tensor seen as a matrix of its last axis.
inline std::int64_t rows_of(const Shape& shape) {
  std::int64_t rows = 1;
  for (int i = 0; i + 1 < shape.rank(); ++i) rows *= shape[i];
  return rows;
}

}  // namespace sherd::ops
