// Rotary position embedding.
#include "runtime/cuda/rotary.h"

#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/ops/rotary.h"
#include "runtime/rows_apart.h"

namespace sherd::cuda {
namespace {

void rotary_table(const ops::RotaryTable& op, Inputs, Outputs out) {
  const Shape& shape = out[0].shape();
  if (shape.numel() == 0) return;
  launch_rotary_table({.dtype = op.spec.dtype,
                       .steps = shape[0],
                       .half = shape[1],
                       .first = op.first,
                       .base = op.base,
                       .factor = op.factor,
                       .low = op.low,
                       .high = op.high,
                       .original = op.original,
                       .by_pair = op.measure == ops::RotaryMeasure::pair,
                       .amplitude = op.amplitude,
                       .cosines = out[0].raw(),
                       .sines = out[1].raw(),
                       .stream = stream_of(out[0].device())});
  check_launch(op.name);
}

void rotary(const ops::Rotary& op, Inputs in, Outputs out) {
  if (in[0].numel() == 0) return;
  const Tensor x = sherd::detail::with_rows_apart(in[0]);
  const Shape &s = x.shape(), &strides = x.strides();
  launch_rotary({.dtype = x.dtype(),
                 .neighbours = op.neighbours,
                 .back = op.back,
                 .batch = s[0],
                 .steps = s[1],
                 .between = s[2],
                 .half = s[3] / 2,
                 .batch_stride = strides[0],
                 .step_stride = strides[1],
                 .between_stride = strides[2],
                 .x = x.raw(),
                 .cosines = in[1].raw(),
                 .sines = in[2].raw(),
                 .y = out[0].raw(),
                 .stream = stream_of(x.device())});
  check_launch(op.name);
}

}  // namespace

void add_rotary() {
  add_kernel<rotary_table>(DeviceType::cuda);
  add_kernel<rotary>(DeviceType::cuda);
}

}  // namespace sherd::cuda
