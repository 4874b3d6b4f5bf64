// Largest and smallest values over axes.
#include "runtime/ops/extreme.h"

#include "runtime/cuda/extreme.h"
#include "runtime/cuda/rank.h"
#include "runtime/cuda/three_axes.h"
#include "runtime/ops.h"

namespace sherd::cuda {
namespace {

/// Writes values, places, or both over `axes` of x.
void find(std::string_view op, const Tensor& x, Mask axes, bool largest, void* values, std::int64_t* places) {
  const ThreeAxes three = as_three_axes(x, axes);
  ExtremeCall call{x.dtype(),     largest, three.outer, three.reduce,         three.inner,
                   three.x.raw(), values,  places,      stream_of(x.device())};
  Tensor partial;
  if (const std::int64_t pieces = call.pieces(); pieces > 1) {
    partial = empty(Shape{pieces * call.outer * call.inner * 2}, {DType::i64, x.device()});
    call.partial = partial.raw();
  }
  launch_extreme(call);
  check_launch(op);
}

void extreme(const ops::Extreme& op, Inputs in, Outputs out) {
  if (out[0].numel() > 0) find(op.name, in[0], op.axes, op.largest, out[0].raw(), nullptr);
}

void argmax(const ops::ArgMax& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Mask axes = in[0].rank() == 0 ? 0 : bit(static_cast<std::size_t>(op.axis));
  find(op.name, in[0], axes, op.largest, nullptr, reinterpret_cast<std::int64_t*>(out[0].raw()));
}

}  // namespace

void add_extreme() {
  add_kernel<extreme>(DeviceType::cuda);
  add_kernel<argmax>(DeviceType::cuda);
}

}  // namespace sherd::cuda
