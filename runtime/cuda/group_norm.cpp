// Group normalisation, and memory for what it shares with batch norm.
#include "runtime/ops/group_norm.h"

#include "runtime/cuda/plane_norm.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"

namespace sherd::cuda {

Tensor room_for_sums(PlaneNormCall& call, Device device) {
  const Tensor room = empty(Shape{2 * call.planes * call.pieces()}, {DType::f64, device});
  call.sums = reinterpret_cast<double*>(room.raw());
  return room;
}

Tensor room_for_sets(PlaneNormGradCall& call, const Tensor& like) {
  const Tensor room = empty(Shape{2 * call.forward.set_count()}, {like.dtype(), like.device()});
  call.of_sets = room.raw();
  return room;
}

namespace {

PlaneNormCall describe(const Tensor& x, const Tensor& weight, const Tensor& mean, const Tensor& rstd) {
  PlaneNormCall call;
  call.dtype = x.dtype();
  call.sets = PlaneNormCall::Sets::neighbours;
  call.spread_is = PlaneNormCall::Spread::rstd;
  call.channels = x.shape()[1];
  call.planes = x.shape()[0] * call.channels;
  call.inner = x.numel() / call.planes;
  call.per_set = call.planes / mean.numel();
  call.x = x.raw();
  call.weight = raw_or_null(weight);
  call.mean = mean.raw();
  call.spread = rstd.raw();
  call.stream = stream_of(x.device());
  return call;
}

void group_norm(const ops::GroupNorm& op, Inputs in, Outputs out) {
  if (in[0].numel() == 0) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  PlaneNormCall call = describe(in[0], in[1], out[1], out[2]);
  call.eps = op.eps;
  call.bias = raw_or_null(in[2]);
  call.y = out[0].raw();
  const Tensor sums = room_for_sums(call, in[0].device());
  launch_plane_statistics(call);
  launch_plane_norm(call);
  check_launch(op.name);
}

void group_norm_grad(const ops::GroupNormGrad& op, Inputs in, Outputs out) {
  if (in[1].numel() == 0) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  PlaneNormGradCall call{
      describe(in[1], in[2], in[3], in[4]), true, in[0].raw(), out[0].raw(), out[1].raw(), out[2].raw()};
  const Tensor sums = room_for_sums(call.forward, in[1].device()), of_sets = room_for_sets(call, in[3]);
  launch_plane_norm_grad(call);
  check_launch(op.name);
}

}  // namespace

void add_group_norm() {
  add_kernel<group_norm>(DeviceType::cuda);
  add_kernel<group_norm_grad>(DeviceType::cuda);
}

}  // namespace sherd::cuda
