#include "runtime/cuda/image_order.h"

#include "runtime/ops.h"

namespace sherd::cuda {
namespace {

/// Strides of a dense tensor in the order N, ..., C.
Shape strides_channels_last(const Shape& shape) {
  Shape strides = shape;
  std::int64_t step = shape[1];
  strides[1] = 1;
  for (int i = shape.rank() - 1; i > 1; --i) {
    strides[i] = step;
    step *= shape[i];
  }
  strides[0] = step;
  return strides;
}

/// Whether both orders are one: there are no two channels, or no two pixels.
bool orders_agree(const Shape& shape) {
  return shape.rank() < 3 || shape.numel() == 0 || shape[1] == 1 || shape.numel() == shape[0] * shape[1];
}

/// Whether the kernels of channels_last.h take it.
bool is_turned_fast(const Tensor& t) {
  return t.rank() > 2 && size_of(t.dtype()) == 2 && t.shape()[1] % 8 == 0;
}

/// Whether an element stands for several, as after `expand`.
bool is_spread(const Tensor& t) {
  for (int i = 0; i < t.rank(); ++i)
    if (t.strides()[i] == 0 && t.shape()[i] > 1) return true;
  return false;
}

}  // namespace

bool is_channels_last(const Tensor& t) {
  if (t.rank() < 3 || t.strides()[1] != 1 || orders_agree(t.shape())) return false;
  const Shape dense = strides_channels_last(t.shape());
  for (int i = 0; i < t.rank(); ++i)
    if (t.shape()[i] != 1 && t.strides()[i] != dense[i]) return false;
  return true;
}

bool runs_channels_last(const Tensor& t) {
  if (t.rank() < 3 || t.strides()[1] != 1 || orders_agree(t.shape())) return false;
  std::int64_t least = t.shape()[1];
  for (int i = t.rank() - 1; i != 1; i = i == 2 ? 0 : i - 1) {
    if (t.shape()[i] > 1 && t.strides()[i] < least) return false;
    if (t.shape()[i] > 1) least = t.strides()[i] * t.shape()[i];
    if (i == 0) break;
  }
  return true;
}

void lay_channels_last(const Tensor& out) {
  if (orders_agree(out.shape()) || !out.is_contiguous()) return;
  out.impl()->layout.strides = strides_channels_last(out.shape());
}

Tensor channels_last(const Tensor& t) {
  if (orders_agree(t.shape())) return contiguous(t);
  if (is_channels_last(t)) return t;
  const Tensor made = empty(t.spec());
  lay_channels_last(made);
  return copy_(made, t);
}

void follow_operands(Inputs in, const Tensor& out) {
  if (out.rank() < 3 || !out.is_contiguous()) return;
  bool any = false;
  for (const Tensor& t : in) {
    if (t.storage_ref() == out.storage_ref()) return;
    if (t.numel() < out.numel() || is_spread(t)) continue;
    if (runs_channels_last(t) && t.rank() == out.rank())
      any = true;
    else if (!t.is_contiguous() || !is_turned_fast(t))
      return;
  }
  if (any) lay_channels_last(out);
}

void join_channels_last(Inputs parts, const Tensor& out) {
  bool any = false;
  for (const Tensor& t : parts) {
    if (t.numel() == 0) continue;
    if (size_of(t.dtype()) != 2 || (!runs_channels_last(t) && !(t.is_contiguous() && is_turned_fast(t))))
      return;
    any = any || runs_channels_last(t);
  }
  if (any) lay_channels_last(out);
}

bool lies_across(const Tensor& t, const Tensor& out) {
  if (!is_turned_fast(t) || t.shape() != out.shape()) return false;
  return (t.is_contiguous() && is_channels_last(out)) || (is_channels_last(t) && out.is_contiguous());
}

}  // namespace sherd::cuda
