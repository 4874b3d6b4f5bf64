// Sums and means over axes.
#include <limits>

#include "runtime/cuda/launchers.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/ops/sum.h"

namespace sherd::cuda {
namespace {

bool has(Mask axes, int axis) { return (axes >> axis) & 1; }

/// `x` dense and as (outer, reduce, inner), by a copy where the reduced axes are apart or memory has holes.
Tensor as_three_axes(const Tensor& x, Mask axes, SumCall& call) {
  Shape order;
  for (int pass = 0; pass < 2; ++pass)
    for (int i = 0; i < x.rank(); ++i)
      if (has(axes, i) == (pass == 1)) order.push_back(i);
  int first = x.rank(), last = -1, count = 0;
  for (int i = 0; i < x.rank(); ++i) {
    if (!has(axes, i)) continue;
    first = std::min(first, i);
    last = i;
    ++count;
  }
  const bool together = last - first + 1 == count || count == 0;
  if (!together) {
    first = x.rank() - count;
    last = x.rank() - 1;
  }
  const Tensor dense = contiguous(together ? x : permute(x, order));
  for (int i = 0; i < x.rank(); ++i)
    (i < first ? call.outer : i > last ? call.inner : call.reduce) *= dense.shape()[i];
  return dense;
}

void sum_kernel(const void* erased, Inputs in, Outputs out) {
  const auto& op = *static_cast<const ops::Sum*>(erased);
  const Tensor& y = out[0];
  if (y.numel() == 0) return;
  SumCall call;
  const Tensor x = as_three_axes(in[0], op.axes, call);
  if (op.mean && call.reduce == 0) {  // the mean of nothing
    fill_(alias(y, y.layout()), std::numeric_limits<double>::quiet_NaN());
    return;
  }
  call.dtype = x.dtype();
  call.factor = op.mean ? 1.0 / static_cast<double>(call.reduce) : 1.0;
  call.x = x.raw();
  call.out = y.raw();
  call.stream = stream_of(y.device());
  Tensor partial;
  if (const std::int64_t pieces = call.pieces(); pieces > 1) {
    partial = empty(Shape{pieces * y.numel()}, {DType::i64, y.device()});
    call.partial = partial.raw();
  }
  launch_sum(call);
  check_launch(op.name);
}

}  // namespace

void add_sum_kernels(KernelTable& table) { table.add<ops::Sum>(sum_kernel); }

}  // namespace sherd::cuda
