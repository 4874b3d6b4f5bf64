// Operands of kernels that read rows of features wherever those lie.
#pragma once

#include "runtime/ops.h"

namespace sherd::detail {

/// x (..., T, Q, D) as (batch, T, Q, D), whose features lie side by side: a view, or a copy where its axes
/// allow none.
inline Tensor with_rows_apart(const Tensor& x) {
  const Shape& s = x.shape();
  const int rank = x.rank();
  const Tensor y = reshape(x, {-1, s[rank - 3], s[rank - 2], s[rank - 1]});
  return y.strides()[3] == 1 || s[rank - 1] == 1 ? y : clone(y);
}

}  // namespace sherd::detail
