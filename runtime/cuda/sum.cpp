// Sums and means over axes.
#include <limits>

#include "runtime/cuda/launchers.h"
#include "runtime/cuda/rank.h"
#include "runtime/cuda/three_axes.h"
#include "runtime/ops.h"
#include "runtime/ops/sum.h"

namespace sherd::cuda {
namespace {

void sum_kernel(const void* erased, Inputs in, Outputs out) {
  const auto& op = *static_cast<const ops::Sum*>(erased);
  const Tensor& y = out[0];
  if (y.numel() == 0) return;
  const auto [x, outer, reduce, inner] = as_three_axes(in[0], op.axes);
  SumCall call;
  call.outer = outer;
  call.reduce = reduce;
  call.inner = inner;
  if (op.mean && call.reduce == 0) {  // the mean of nothing
    fill_(alias(y, y.layout()), std::numeric_limits<double>::quiet_NaN());
    return;
  }
  call.dtype = x.dtype();
  call.divisor = op.mean ? static_cast<double>(call.reduce) : 1.0;
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

void add_sum() { kernel_row<ops::Sum>().set(DeviceType::cuda, sum_kernel); }

}  // namespace sherd::cuda
