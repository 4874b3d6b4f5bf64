// Transposed convolutions: conv2d's gradient towards its input, which has kernels and gradients.
#include <algorithm>

#include "runtime/apply.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/conv2d.h"

namespace sherd {
namespace {

constexpr std::int64_t most = ops::ConvRule::most;

/// Pixels of the result along an axis of `size`, `more` of them padding.
std::int64_t size_of(std::string_view call, const ops::ConvRule::Axis& axis, std::int64_t more,
                     std::int64_t size, std::int64_t kernel) {
  const auto [stride, padding, dilation] = axis;
  axis.check_for(call);
  check<ValueError>(
      stride < most && more >= 0 && more < std::max(stride, dilation),
      "{}: output padding {} must be at least 0, and less than the stride {} or the dilation {}, "
      "which are below 2^31",
      call, more, stride, dilation);
  check<ShapeError>(size > 0 && size < most && kernel > 0 && kernel < most,
                    "{}: images and kernels have at least one and below 2^31 pixels a side, got {} and {}",
                    call, size, kernel);
  const std::int64_t full = (size - 1) * stride + dilation * (kernel - 1) + 1 + more;
  check<ShapeError>(
      full > 2 * padding && full - 2 * padding < most,
      "{}: {} pixels become {}, of which the padding {} takes twice its own; 1 to 2^31 - 1 may stay", call,
      size, full, padding);
  return full - 2 * padding;
}

/// What all shapes and dtypes must be, of images.
void check_inputs(std::string_view call, const Tensor& x, const Tensor& weight, const Tensor& bias,
                  std::int64_t groups) {
  check<DTypeError>(is_floating(x.dtype()), "{}: takes floating dtypes, got {}; cast the input first", call,
                    name_of(x.dtype()));
  check<DTypeError>(weight.dtype() == x.dtype(), "{}: input is {} and its weight {}; cast one of them", call,
                    name_of(x.dtype()), name_of(weight.dtype()));
  check<DeviceError>(weight.device() == x.device() && (!bias.defined() || bias.device() == x.device()),
                     "{}: input on {}, its weight on {} and its bias on {}; move them together", call,
                     x.device(), weight.device(), bias.defined() ? bias.device() : weight.device());
  check<ValueError>(groups > 0, "{}: {} groups; at least one", call, groups);
  check<ShapeError>(x.shape()[1] == weight.shape()[0] && x.shape()[1] % groups == 0,
                    "{}: input of {} channels, weight (C, out / groups, ...) of {}, and {} groups", call,
                    x.shape()[1], weight.shape(), groups);
  if (!bias.defined()) return;
  check<ShapeError>(bias.shape() == Shape{weight.shape()[1] * groups}, "{}: bias of shape {} for {} outputs",
                    call, bias.shape(), weight.shape()[1] * groups);
  check<DTypeError>(bias.dtype() == x.dtype(), "{}: input is {} and its bias {}; cast one of them", call,
                    name_of(x.dtype()), name_of(bias.dtype()));
}

Tensor transposed(std::string_view call, const Tensor& x, const Tensor& weight, const Tensor& bias,
                  const ops::ConvRule& rule, PerAxis more) {
  check_inputs(call, x, weight, bias, rule.groups);
  const Shape &s = x.shape(), &w = weight.shape();
  const std::int64_t rows = size_of(call, rule.down, more.down, s[2], w[2]);
  const std::int64_t columns = size_of(call, rule.across, more.across, s[3], w[3]);
  return apply(ops::Conv2dGradInput{rule, rows, columns}, x, weight, bias);
}

}  // namespace

Tensor conv_transpose2d(const Tensor& x, const Tensor& weight, const Tensor& bias,
                        const ConvTranspose2dOptions& o) {
  detail::check_given("conv_transpose2d", x, weight);
  check<ShapeError>(
      x.rank() == 4 && weight.rank() == 4,
      "conv_transpose2d: input (N, C, H, W) and weight (C, out / groups, height, width), got {} and {}",
      x.shape(), weight.shape());
  const ops::ConvRule rule{{o.stride.down, o.padding.down, o.dilation.down},
                           {o.stride.across, o.padding.across, o.dilation.across},
                           o.groups};
  return transposed("conv_transpose2d", x, weight, bias, rule, o.output_padding);
}

Tensor conv_transpose1d(const Tensor& x, const Tensor& weight, const Tensor& bias,
                        const ConvTranspose1dOptions& o) {
  detail::check_given("conv_transpose1d", x, weight);
  check<ShapeError>(x.rank() == 3 && weight.rank() == 3,
                    "conv_transpose1d: input (N, C, L) and weight (C, out / groups, length), got {} and {}",
                    x.shape(), weight.shape());
  const ops::ConvRule rule{{}, {o.stride, o.padding, o.dilation}, o.groups};
  const Tensor image = unsqueeze(x, 2), kernel = unsqueeze(weight, 2);  // of one row
  return squeeze(transposed("conv_transpose1d", image, kernel, bias, rule, {0, o.output_padding}), 2);
}

}  // namespace sherd
