// A product of matrices in the stream of its device, for kernels that multiply as a part of what they do.
#pragma once

#include "runtime/cuda/matmul_plans.h"
#include "runtime/cuda/small_factors.h"
#include "runtime/op.h"
#include "runtime/ops/matrix_operand.h"

namespace sherd::cuda {

/// What is added to a product; empty handles where there is none. Dense, and aligned for wide loads.
struct Addends {
  Tensor bias, residual;
};

/// What a product multiplies; its shape has m, n, k and batch.
struct Factors {
  ProductShape shape;
  ops::MatrixOperand a, b;
  Addends add{};
};
/// Of `MatMul` or `Linear`, whose result has that shape.
Factors factors_of(const AnyOp& op, Inputs in, const Shape& result);
/// As a kernel of a small product is given them; `factors` holds what it reads.
SmallFactors small_factors(const Factors& factors);

/// C = A B of m, n, k and batch as given (`shape`'s other members are found here), into dense `c`.
void multiply(const Factors& factors, const Tensor& c);
/// The same, or ReLU of it with the bits that this has of the sum; false, and nothing queued, where that
/// takes a kernel of its own.
bool multiply_with_relu(const Factors& factors, const Tensor& c);
/// What is added, as `multiply` takes it.
Tensor dense_addend(const Tensor& t);

}  // namespace sherd::cuda
