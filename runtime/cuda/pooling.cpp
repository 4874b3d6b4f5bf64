// Pooling.
#include "runtime/cuda/pooling.h"

#include "runtime/apply.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/ops/pool2d.h"

namespace sherd::cuda {
namespace {

/// Whether all numbers of a call fit the kernels' 32 bits.
bool fits(const ops::PoolRule& rule, const Shape& images) {
  constexpr std::int64_t most = std::int64_t{1} << 30;
  return images[2] < most && images[3] < most && images[2] * images[3] < most && rule.down.kernel < most &&
         rule.across.kernel < most && rule.down.stride < most && rule.across.stride < most;
}

PoolCall::Axis narrow(const ops::PoolRule::Axis& axis) {
  return {static_cast<int>(axis.kernel), static_cast<int>(axis.stride), static_cast<int>(axis.padding)};
}

PoolCall describe(const ops::PoolRule& rule, const Shape& images, const Shape& windows, const Tensor& x,
                  const Tensor& y) {
  PoolCall call;
  call.dtype = x.dtype();
  call.down_rule = narrow(rule.down);
  call.across_rule = narrow(rule.across);
  call.planes = images[0] * images[1];
  call.rows = static_cast<int>(images[2]);
  call.columns = static_cast<int>(images[3]);
  call.down = static_cast<int>(windows[2]);
  call.across = static_cast<int>(windows[3]);
  call.x = x.raw();
  call.y = y.raw();
  call.stream = stream_of(x.device());
  return call;
}

std::int64_t* integers(const Tensor& t) { return reinterpret_cast<std::int64_t*>(t.raw()); }

void max_pool(const ops::MaxPool2d& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  if (!fits(op.rule, in[0].shape())) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  PoolCall call = describe(op.rule, in[0].shape(), out[0].shape(), in[0], out[0]);
  call.places = integers(out[1]);
  launch_max_pool(call);
  check_launch(op.name);
}

void max_pool_grad(const ops::MaxPool2dGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  if (!fits(op.rule, out[0].shape())) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  PoolCall call = describe(op.rule, out[0].shape(), in[0].shape(), in[0], out[0]);
  call.places = integers(in[1]);
  launch_max_pool_grad(call);
  check_launch(op.name);
}

void avg_pool(const ops::AvgPool2d& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  if (!fits(op.rule, in[0].shape())) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  launch_avg_pool(describe(op.rule, in[0].shape(), out[0].shape(), in[0], out[0]));
  check_launch(op.name);
}

void avg_pool_grad(const ops::AvgPool2dGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  if (!fits(op.rule, out[0].shape())) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  launch_avg_pool_grad(describe(op.rule, out[0].shape(), in[0].shape(), in[0], out[0]));
  check_launch(op.name);
}

}  // namespace

void add_pooling() {
  add_kernel<max_pool>(DeviceType::cuda);
  add_kernel<max_pool_grad>(DeviceType::cuda);
  add_kernel<avg_pool>(DeviceType::cuda);
  add_kernel<avg_pool_grad>(DeviceType::cuda);
}

}  // namespace sherd::cuda
