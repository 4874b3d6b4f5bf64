// A product of matrices in the stream of its device, for kernels that multiply as a part of what they do.
#pragma once

#include "runtime/cuda/matmul_plans.h"
#include "runtime/ops/matrix_operand.h"

namespace sherd::cuda {

/// What is added to a product; empty handles where there is none. Dense, and aligned for wide loads.
struct Addends {
  Tensor bias, residual;
};

/// C = A B of m, n, k and batch as given (`shape`'s other members are found here), into dense `c`.
void multiply(ProductShape shape, const ops::MatrixOperand& a, const ops::MatrixOperand& b,
              const Addends& add, const Tensor& c);
/// What is added, as `multiply` takes it.
Tensor dense_addend(const Tensor& t);

}  // namespace sherd::cuda
