// Batch normalisation.
#include "runtime/ops/batch_norm.h"

#include <algorithm>
#include <cstdint>

#include "runtime/cuda/batch_norm.h"
#include "runtime/cuda/image_order.h"
#include "runtime/cuda/plane_norm.h"
#include "runtime/cuda/rank.h"
#include "runtime/in_parts.h"
#include "runtime/ops.h"

namespace sherd::cuda {
namespace {

/// Dense and in the dtype of the statistics.
Tensor as_statistics(const Tensor& t, const Tensor& x) {
  return t.defined() ? contiguous(to(t, x.dtype() == DType::f64 ? DType::f64 : DType::f32)) : t;
}
/// `t` as the kernels read it, where x lies with its channels last or does not; or none.
Tensor ordered(const Tensor& t, bool last) {
  return !t.defined() ? t : last ? channels_last(t) : contiguous(t);
}
/// gy so. ReLU's gradient, were it a tensor of its own, would begin where packs may, on which the tree of
/// sums depends: with ReLU gy begins so too.
Tensor upstream(const Tensor& gy, bool last, bool relu) {
  const Tensor given = ordered(gy, last);
  const bool packs = reinterpret_cast<std::uintptr_t>(given.raw()) % 16 == 0;
  return packs || !relu ? given : ordered(clone(gy), last);
}
BatchNormCall describe(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& mean,
                       const Tensor& variance, double eps) {
  BatchNormCall call;
  call.dtype = x.dtype();
  call.channels = x.shape()[1];
  call.batch = is_channels_last(x) ? x.numel() / call.channels : x.shape()[0];
  call.inner = x.numel() / (call.batch * call.channels);
  call.eps = eps;
  call.x = x.raw();
  call.weight = raw_or_null(weight);
  call.bias = raw_or_null(bias);
  call.mean = mean.raw();
  call.variance = variance.raw();
  call.stream = stream_of(x.device());
  return call;
}

Tensor room_for_sums(BatchNormCall& call, Device device) {
  const Tensor room = empty(Shape{2 * call.channels * call.pieces()}, {DType::f64, device});
  call.sums = reinterpret_cast<double*>(room.raw());
  return room;
}

/// The same, for channels whose elements lie side by side in planes.
PlaneNormCall planes_of(const BatchNormCall& c) {
  PlaneNormCall call{.dtype = c.dtype,
                     .planes = c.batch * c.channels,
                     .channels = c.channels,
                     .inner = c.inner,
                     .per_set = c.batch,
                     .eps = c.eps};
  call.x = c.x, call.weight = c.weight, call.bias = c.bias;
  call.mean = c.mean, call.spread = c.variance, call.y = c.y;
  call.epilogue = c.epilogue;
  call.stream = c.stream;
  return call;
}

void batch_norm(const ops::BatchNorm& op, Inputs in, Outputs out) {
  const bool last = is_channels_last(in[0]);
  const Tensor x = ordered(in[0], last), weight = as_statistics(in[1], x), bias = as_statistics(in[2], x),
               residual = ordered(in[5], last);
  if (!op.training) {
    copy_(alias(out[1], out[1].layout()), in[3]);
    copy_(alias(out[2], out[2].layout()), in[4]);
  }
  if (x.numel() == 0) return;
  if (last) lay_channels_last(out[0]);
  BatchNormCall call = describe(x, weight, bias, out[1], out[2], op.eps);
  call.y = out[0].raw();
  call.epilogue = {raw_or_null(residual), op.relu};
  if (call.inner > 1) {
    PlaneNormCall planes = planes_of(call);
    const Tensor sums = op.training ? room_for_sums(planes, x.device()) : Tensor();
    if (op.training) launch_plane_statistics(planes);
    launch_plane_norm(planes);
  } else {
    const Tensor sums = op.training ? room_for_sums(call, x.device()) : Tensor();
    if (op.training) launch_channel_statistics(call);
    launch_batch_norm(call);
  }
  check_launch(op.name);
}

void batch_norm_grad(const ops::BatchNormGrad& op, Inputs in, Outputs out) {
  const bool last = is_channels_last(in[1]);
  const Tensor x = ordered(in[1], last), weight = as_statistics(in[2], x), y = ordered(in[5], last);
  // Of planes, and of what lies elsewhere, the sum is made first.
  const bool in_parts = in[7].defined() && last && x.numel() > 0;
  const Tensor gy = upstream(in_parts ? in[0] : ops::in_one({op.first_part, op.second_part}, in), last,
                             in[5].defined() || in_parts),
               more = in_parts ? upstream(in[7], last, true) : Tensor();
  if (x.numel() == 0) {
    zero_(alias(out[1], out[1].layout()));
    zero_(alias(out[2], out[2].layout()));
    return;
  }
  const Tensor mean = contiguous(in[3]), variance = contiguous(in[4]);
  if (last) lay_channels_last(out[0]);
  if (last && op.of_residual) lay_channels_last(out[3]);
  NormEpilogueGrad epilogue{raw_or_null(y), op.of_residual ? out[3].raw() : nullptr};
  const Tensor bias = op.of_inputs ? as_statistics(in[6], x) : Tensor();
  BatchNormCall call = describe(x, weight, bias, mean, variance, op.eps);
  if (call.inner > 1) {
    PlaneNormGradCall planes{planes_of(call), op.training,  gy.raw(),
                             out[0].raw(),    out[1].raw(), out[2].raw()};
    planes.epilogue = epilogue;
    const Tensor sums = room_for_sums(planes.forward, x.device()), of_sets = room_for_sets(planes, mean);
    launch_plane_norm_grad(planes);
  } else {
    const Tensor sums = room_for_sums(call, x.device()),
                 of_channels = empty({2 * call.channels}, {mean.dtype(), x.device()});
    epilogue.y_again = op.of_inputs;
    launch_batch_norm_grad({call, op.training, gy.raw(), raw_or_null(more), out[0].raw(), out[1].raw(),
                            out[2].raw(), of_channels.raw(), epilogue});
  }
  check_launch(op.name);
}

void running_statistics(const ops::RunningStatistics& op, Inputs in, Outputs) {
  if (op.moved_others(in)) return;
  if (in[0].numel() == 0) return;
  launch_running_statistics({in[0].dtype(), in[1].dtype(), in[0].numel(), 1 - op.momentum, op.momentum,
                             op.momentum * op.unbiased, in[0].raw(), in[2].raw(), in[1].raw(), in[3].raw(),
                             stream_of(in[0].device())});
  check_launch(op.name);
}

}  // namespace

/// Whose kernel reads parts: batch norm's backward's, where an application has put none of its own.
std::optional<ops::InParts> reads_parts(const AnyOp& op) {
  static const Kernel own = kernel_row<ops::BatchNormGrad>().on(DeviceType::cuda);
  const bool reads =
      &op.kernels() == &kernel_row<ops::BatchNormGrad>() && op.kernels().on(DeviceType::cuda) == own;
  return reads ? std::optional(ops::InParts{ops::BatchNormGrad::first_part, ops::BatchNormGrad::second_part})
               : std::nullopt;
}

void add_batch_norm() {
  add_kernel<batch_norm>(DeviceType::cuda);
  add_kernel<batch_norm_grad>(DeviceType::cuda);
  add_kernel<running_statistics>(DeviceType::cuda);
  ops::set_reads_parts(DeviceType::cuda, reads_parts);
}

}  // namespace sherd::cuda
