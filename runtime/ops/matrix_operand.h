// How a tensor enters a matrix library.
#pragma once

#include "runtime/tensor.h"

namespace sherd::ops {

/// A matrix operand in memory as the kernel wants it: rows dense, or columns dense and the flag flipped.
struct MatrixOperand {
  Tensor keep;  // holds a dense copy where one was needed
  const std::byte* data = nullptr;
  std::int64_t ld = 0, batch_step = 0;  // in elements
  bool transposed = false;
};

/// The last two axes of `t` as matrices, the axes before them as one batch axis.
MatrixOperand matrix_operand(const Tensor& t, bool transposed);
/// The elements of `x` in row-major order as one matrix of m rows and k columns.
MatrixOperand rows_operand(const Tensor& x, std::int64_t m, std::int64_t k);

}  // namespace sherd::ops
