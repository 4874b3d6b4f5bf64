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

std::optional<ThreeAxes> as_rows_with_gaps(const Tensor& x, Mask axes) {
  if (x.numel() == 0) return {};
  ThreeAxes rows{x};
  for (int i = x.rank() - 1; i >= 0; --i) {
    const bool reduced = ((axes >> i) & 1) != 0;
    const std::int64_t size = x.shape()[i], stride = x.strides()[i];
    if (!reduced && rows.pitch != 0) return {};
    if (size == 1) continue;
    if (reduced && rows.pitch == 0) rows.pitch = stride;
    if (stride != (reduced ? rows.pitch * rows.reduce : rows.inner)) return {};
    (reduced ? rows.reduce : rows.inner) *= size;
  }
  if (rows.inner == 1 || rows.pitch <= rows.inner) return {};
  return rows;
}

}  // namespace sherd::cuda
