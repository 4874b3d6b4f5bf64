// Sums and means over axes.
#include <limits>

#include "runtime/cuda/launchers.h"
#include "runtime/cuda/rank.h"
#include "runtime/cuda/three_axes.h"
#include "runtime/ops.h"
#include "runtime/ops/sum.h"

namespace sherd::cuda {
namespace {

/// Sums, over `divisor`, or means; of |x|^power unless that is 0.
void reduce(std::string_view op, const Tensor& given, Mask axes, bool mean, int power, const Tensor& y) {
  if (y.numel() == 0) return;
  const auto [x, outer, reduced, inner] = as_three_axes(given, axes);
  SumCall call;
  call.outer = outer;
  call.reduce = reduced;
  call.inner = inner;
  if (mean && reduced == 0) {  // the mean of nothing
    fill_(alias(y, y.layout()), std::numeric_limits<double>::quiet_NaN());
    return;
  }
  call.dtype = x.dtype();
  call.divisor = mean ? static_cast<double>(reduced) : 1.0;
  call.power = power;
  call.x = x.raw();
  call.out = y.raw();
  call.stream = stream_of(y.device());
  Tensor partial;
  if (const std::int64_t pieces = call.pieces(); pieces > 1) {
    partial = empty(Shape{pieces * y.numel()}, {DType::i64, y.device()});
    call.partial = partial.raw();
  }
  launch_sum(call);
  check_launch(op);
}

void sum(const ops::Sum& op, Inputs in, Outputs out) { reduce(op.name, in[0], op.axes, op.mean, 0, out[0]); }
void power_sum(const ops::PowerSum& op, Inputs in, Outputs out) {
  reduce(op.name, in[0], op.axes, false, op.power, out[0]);
}

}  // namespace

void add_sum() {
  add_kernel<sum>(DeviceType::cuda);
  add_kernel<power_sum>(DeviceType::cuda);
}

}  // namespace sherd::cuda
