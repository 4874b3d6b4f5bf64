// Pooling.
#include "runtime/cuda/pooling.h"

#include <algorithm>

#include "runtime/apply.h"
#include "runtime/cuda/image_order.h"
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

/// Whether images are pooled as they lie, with channels last: those whose channels fit as well.
bool stays_last(const Tensor& t, const Shape& images, const Shape& windows) {
  constexpr std::int64_t most = std::int64_t{1} << 30;
  return is_channels_last(t) && images[1] < most / std::max(images[3], windows[3]);
}

/// A call from x to y, both in the order that `last` says: x is copied if need be, y laid out so.
struct Pooling {
  Tensor x;
  PoolCall call;

  Pooling(const ops::PoolRule& rule, const Shape& images, const Shape& windows, bool last,
          const Tensor& given, const Tensor& y)
      : x(last ? channels_last(given) : contiguous(given)) {
    if (last) lay_channels_last(y);
    call.dtype = x.dtype();
    call.few_numbers = rule.numbers() == DType::u8;
    call.down_rule = narrow(rule.down);
    call.across_rule = narrow(rule.across);
    call.planes = images[0] * images[1];
    call.channels = last ? static_cast<int>(images[1]) : 0;
    call.rows = static_cast<int>(images[2]);
    call.columns = static_cast<int>(images[3]);
    call.down = static_cast<int>(windows[2]);
    call.across = static_cast<int>(windows[3]);
    call.x = x.raw();
    call.y = y.raw();
    call.stream = stream_of(x.device());
  }
};

void max_pool(const ops::MaxPool2d& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Shape &images = in[0].shape(), &windows = out[0].shape();
  if (!fits(op.rule, images)) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  const bool last = stays_last(in[0], images, windows);
  Pooling pooling(op.rule, images, windows, last, in[0], out[0]);
  if (last) lay_channels_last(out[1]);
  pooling.call.numbers = out[1].raw();
  launch_max_pool(pooling.call);
  check_launch(op.name);
}

void max_pool_grad(const ops::MaxPool2dGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Shape &images = out[0].shape(), &windows = in[0].shape();
  if (!fits(op.rule, images)) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  const bool last = stays_last(in[0], images, windows) || stays_last(in[1], images, windows);
  Pooling pooling(op.rule, images, windows, last, in[0], out[0]);
  const Tensor numbers = last ? channels_last(in[1]) : contiguous(in[1]);
  pooling.call.numbers = numbers.raw();
  launch_max_pool_grad(pooling.call);
  check_launch(op.name);
}

void avg_pool(const ops::AvgPool2d& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Shape &images = in[0].shape(), &windows = out[0].shape();
  if (!fits(op.rule, images)) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  const Pooling pooling(op.rule, images, windows, stays_last(in[0], images, windows), in[0], out[0]);
  launch_avg_pool(pooling.call);
  check_launch(op.name);
}

void avg_pool_grad(const ops::AvgPool2dGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Shape &images = out[0].shape(), &windows = in[0].shape();
  if (!fits(op.rule, images)) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  const Pooling pooling(op.rule, images, windows, stays_last(in[0], images, windows), in[0], out[0]);
  launch_avg_pool_grad(pooling.call);
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
