// Axes turned round: a copy that reads them from their end.
#include "runtime/ops/flip.h"

#include "runtime/cuda/launchers.h"
#include "runtime/cuda/rank.h"
#include "runtime/tensor.h"

namespace sherd::cuda {
namespace {

/// Adds axis `d`, or makes the last one longer where `d` continues it in both operands.
void add_axis(Operands& p, std::int64_t size, std::int64_t to, std::int64_t from) {
  const int last = p.rank - 1;
  if (size == 1) return;
  if (p.rank > 0 && p.strides[0][last] == size * to && p.strides[1][last] == size * from) {
    p.sizes[last] *= size;
  } else {
    p.sizes[p.rank++] = size;
  }
  p.strides[0][p.rank - 1] = to;
  p.strides[1][p.rank - 1] = from;
}

void flip(const ops::Flip& op, Inputs in, Outputs out) {
  const Tensor &x = in[0], &y = out[0];
  Operands p;
  p.dtype = p.out_dtype = x.dtype();
  p.numel = y.numel();
  if (p.numel == 0) return;
  p.stream = stream_of(y.device());
  std::int64_t start = 0;
  for (int d = 0; d < x.rank(); ++d) {
    const std::int64_t size = x.shape()[d], stride = x.strides()[d];
    const bool turned = has(op.axes, static_cast<std::size_t>(d));
    if (turned) start += (size - 1) * stride;
    add_axis(p, size, y.strides()[d], turned ? -stride : stride);
  }
  p.data[0] = y.raw();
  p.data[1] = static_cast<std::byte*>(x.raw()) + start * size_of(p.dtype);
  launch_copy(p);
  check_launch(op.name);
}

}  // namespace

void add_flip() { add_kernel<flip>(DeviceType::cuda); }

}  // namespace sherd::cuda
