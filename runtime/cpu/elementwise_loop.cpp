#include "runtime/cpu/elementwise_loop.h"

namespace sherd::detail {
namespace {

/// Dimensions d and d+1 are one when every operand steps over them as over one.
bool mergeable(const Walk& w, int d) {
  for (int k = 0; k < w.operands; ++k)
    if (w.strides[k][d] != w.strides[k][d + 1] * w.sizes[d + 1]) return false;
  return true;
}

void erase_dimension(Walk& w, int d) {
  for (int i = d; i + 1 < w.rank; ++i) {
    w.sizes[i] = w.sizes[i + 1];
    for (int k = 0; k < w.operands; ++k) w.strides[k][i] = w.strides[k][i + 1];
  }
  --w.rank;
}

void collapse(Walk& w) {
  for (int d = w.rank - 1; d >= 0; --d)
    if (w.sizes[d] == 1) erase_dimension(w, d);
  for (int d = w.rank - 2; d >= 0; --d) {
    if (!mergeable(w, d)) continue;
    w.sizes[d + 1] *= w.sizes[d];
    erase_dimension(w, d);
  }
}

}  // namespace

Walk plan_walk(Inputs in, const Tensor& out) {
  Walk w;
  w.operands = 1 + static_cast<int>(in.size());
  w.data[0] = out.raw();
  const Shape& shape = out.shape();
  bool dense = out.is_contiguous();
  for (std::size_t k = 0; k < in.size(); ++k) {
    w.data[k + 1] = in[k].raw();
    dense = dense && in[k].shape() == shape && in[k].is_contiguous();
  }
  if (dense) {  // the common case, without looking at dimensions
    w.rank = 1;
    w.sizes[0] = shape.numel();
    for (int k = 0; k < w.operands; ++k) w.strides[k][0] = 1;
    return w;
  }
  w.rank = shape.rank();
  for (int d = 0; d < w.rank; ++d) {
    w.sizes[d] = shape[d];
    w.strides[0][d] = out.strides()[d];
    for (std::size_t k = 0; k < in.size(); ++k) {
      const int at = d - (w.rank - in[k].rank());
      w.strides[k + 1][d] = at < 0 || in[k].shape()[at] == 1 ? 0 : in[k].strides()[at];
    }
  }
  collapse(w);
  return w;
}

}  // namespace sherd::detail
