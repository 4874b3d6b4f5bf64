#include "runtime/cuda/three_axes.h"

#include <algorithm>

#include "runtime/ops.h"

namespace sherd::cuda {

ThreeAxes as_three_axes(const Tensor& x, Mask axes) {
  const auto reduced = [axes](int axis) { return ((axes >> axis) & 1) != 0; };
  Shape order;
  for (bool pass : {false, true})
    for (int i = 0; i < x.rank(); ++i)
      if (reduced(i) == pass) order.push_back(i);
  int first = x.rank(), last = -1, count = 0;
  for (int i = 0; i < x.rank(); ++i) {
    if (!reduced(i)) continue;
    first = std::min(first, i);
    last = i;
    ++count;
  }
  const bool together = last - first + 1 == count || count == 0;
  if (!together) {
    first = x.rank() - count;
    last = x.rank() - 1;
  }
  ThreeAxes three{contiguous(together ? x : permute(x, order))};
  for (int i = 0; i < x.rank(); ++i)
    (i < first ? three.outer : i > last ? three.inner : three.reduce) *= three.x.shape()[i];
  return three;
}

std::int64_t pitch_of_rows(const Tensor& x, Mask axes) {
  if (x.numel() == 0) return 0;
  const auto reduced = [axes](int axis) { return ((axes >> axis) & 1) != 0; };
  std::int64_t row = 1, pitch = 0, next = 0;
  for (int i = x.rank() - 1; i >= 0; --i) {
    const std::int64_t size = x.shape()[i], stride = x.strides()[i];
    if (!reduced(i) && pitch != 0) return 0;
    if (size == 1) continue;
    if (!reduced(i)) {
      if (stride != row) return 0;
      row *= size;
    } else if (pitch == 0) {
      pitch = stride;
      next = stride * size;
    } else {
      if (stride != next) return 0;
      next *= size;
    }
  }
  return pitch > row && row > 1 ? pitch : 0;
}

}  // namespace sherd::cuda
