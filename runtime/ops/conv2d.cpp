#include "runtime/ops/conv2d.h"

#include "runtime/apply.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/patches.h"
#include "runtime/ops/slice.h"

namespace sherd {
namespace ops {
namespace {

/// What images and lines have in common; both ranks are right.
void check_channels(std::string_view call, const Spec& x, const Spec& weight, const Spec& bias,
                    std::int64_t groups) {
  const Shape& w = weight.shape;
  check<DTypeError>(is_floating(x.dtype), "{}: takes floating dtypes, got {}; cast the input first", call,
                    name_of(x.dtype));
  check<DTypeError>(weight.dtype == x.dtype, "{}: input is {} and its weight {}; cast one of them", call,
                    name_of(x.dtype), name_of(weight.dtype));
  check<ValueError>(groups > 0, "{}: {} groups; at least one", call, groups);
  check<ShapeError>(x.shape[1] % groups == 0 && x.shape[1] / groups == w[1],
                    "{}: the input has {} channels and the weight takes {} in each of {} groups: {} and {}",
                    call, x.shape[1], w[1], groups, x.shape, w);
  check<ShapeError>(w[0] % groups == 0, "{}: {} outputs are not a multiple of {} groups", call, w[0], groups);
  if (bias.is_none()) return;
  check<ShapeError>(bias.shape == Shape{w[0]}, "{}: bias of shape {} for {} outputs", call, bias.shape, w[0]);
  check<DTypeError>(bias.dtype == x.dtype, "{}: input is {} and its bias {}; cast one of them", call,
                    name_of(x.dtype), name_of(bias.dtype));
}

constexpr std::int64_t most = ConvRule::most;

/// Whether `Patches` can make the windows, padding apart.
bool is_even(const ConvRule& rule) {
  return rule.down.stride == rule.across.stride && rule.down.dilation == 1 && rule.across.dilation == 1;
}

/// (..., groups * n) as (groups, rows, n).
Tensor by_group(const Tensor& x, std::int64_t groups) {
  const std::int64_t n = x.shape().back() / groups;
  std::int64_t rows = 1;
  for (int i = 0; i + 1 < x.rank(); ++i) rows *= x.shape()[i];
  return permute(reshape(x, {rows, groups, n}), {1, 0, 2});
}

/// conv2d, but no more windows than the image `like` has pixels: the images of a transposed convolution may
/// have room for more, where a dilation is larger than the stride.
Tensor conv_like(const Shape& like, const ConvRule& rule, const Tensor& x, const Tensor& weight) {
  const Tensor y = apply(Conv2d{rule}, x, weight, Tensor{});
  return y.shape() == like ? y : narrow(narrow(y, 2, 0, like[2]), 3, 0, like[3]);
}

}  // namespace

void ConvRule::Axis::check_for(std::string_view call) const {
  check<ValueError>(stride > 0 && padding >= 0 && padding < most && dilation > 0 && dilation < most,
                    "{}: stride {} must be at least 1, padding {} at least 0 and dilation {} at least 1, the "
                    "last two below 2^31",
                    call, stride, padding, dilation);
}

Tensor windows_of(const ConvRule& rule, const Tensor& x, std::int64_t height, std::int64_t width,
                  std::int64_t down, std::int64_t across) {
  const std::int64_t p = rule.down.padding, q = rule.across.padding;
  if (is_even(rule) && p == q) return apply(Patches{{height, width, rule.down.stride, p}}, x);
  const Tensor image = p == 0 && q == 0 ? x : pad(x, {q, q, p, p});
  if (is_even(rule)) return apply(Patches{{height, width, rule.down.stride, 0}}, image);
  std::vector<Tensor> taps;  // (N, C, down, across) each
  for (std::int64_t i = 0; i < height; ++i)
    for (std::int64_t j = 0; j < width; ++j)
      taps.push_back(apply(Slice{3, j * rule.across.dilation, rule.across.stride, across},
                           apply(Slice{2, i * rule.down.dilation, rule.down.stride, down}, image)));
  return reshape(permute(stack(taps, 4), {0, 2, 3, 1, 4}),
                 {x.shape()[0], down, across, x.shape()[1] * height * width});
}

Tensor images_of(const ConvRule& rule, const Tensor& windows, std::int64_t height, std::int64_t width,
                 std::int64_t rows, std::int64_t columns) {
  const std::int64_t p = rule.down.padding, q = rule.across.padding;
  if (is_even(rule) && p == q)
    return apply(PatchesGrad{{height, width, rule.down.stride, p}, rows, columns}, windows);
  const Shape& s = windows.shape();
  const std::int64_t h = rows + 2 * p, w = columns + 2 * q, taps = height * width;
  const DType wide = compute_dtype(windows.dtype());
  const Tensor each =
      permute(reshape(to(windows, wide), {s[0], s[1], s[2], s[3] / taps, taps}), {4, 0, 3, 1, 2});
  Tensor total = zeros({s[0], s[3] / taps, h, w}, {wide, windows.device()});
  for (std::int64_t i = 0; i < height; ++i)
    for (std::int64_t j = 0; j < width; ++j)
      total = add(total, apply(Unslice{{2, i * rule.down.dilation, rule.down.stride, s[1]}, h},
                               apply(Unslice{{3, j * rule.across.dilation, rule.across.stride, s[2]}, w},
                                     select(each, 0, i * width + j))));
  return to(narrow(narrow(total, 2, p, rows), 3, q, columns), windows.dtype());
}

Specs Conv2d::infer(SpecSpan in) const {
  const Spec &x = in[0], &weight = in[1], &bias = in[2];
  const Shape& w = weight.shape;
  check<ShapeError>(x.shape.rank() == 4 && w.rank() == 4 && w[2] > 0 && w[3] > 0,
                    "conv2d: input (N, C, H, W) and weight (out, C / groups, height, width), got {} and {}",
                    x.shape, w);
  check_channels(name, x, weight, bias, rule.groups);
  rule.down.check_for(name), rule.across.check_for(name);
  check<ShapeError>(w[2] < most && w[3] < most && x.shape[2] < most && x.shape[3] < most,
                    "conv2d: images and kernels have below 2^31 pixels a side, got {} and {} x {}", x.shape,
                    w[2], w[3]);
  const std::int64_t h = x.shape[2] + 2 * rule.down.padding, v = x.shape[3] + 2 * rule.across.padding;
  check<ShapeError>(
      h > 0 && v > 0 && (h - 1) / rule.down.dilation >= w[2] - 1 &&
          (v - 1) / rule.across.dilation >= w[3] - 1,
      "conv2d: a kernel of {} x {} spread by {} and {} does not fit input {} padded by {} and {}", w[2], w[3],
      rule.down.dilation, rule.across.dilation, x.shape, rule.down.padding, rule.across.padding);
  return {{Shape{x.shape[0], w[0], (h - (w[2] - 1) * rule.down.dilation - 1) / rule.down.stride + 1,
                 (v - (w[3] - 1) * rule.across.dilation - 1) / rule.across.stride + 1},
           x.dtype, x.device}};
}

Tensors Conv2d::grad(const GradArgs& args) const {
  const Shape &x = args.specs[0].shape, &w = args.specs[1].shape;
  Tensors grads(3);
  if (args.need(0)) grads[0] = apply(Conv2dGradInput{rule, x[2], x[3]}, args.gy[0], args.inputs[1], Tensor{});
  if (args.need(1)) grads[1] = apply(Conv2dGradWeight{rule, w[2], w[3]}, args.gy[0], args.inputs[0]);
  if (args.need(2)) grads[2] = sum(args.gy[0], {0, 2, 3});
  return grads;
}

Tensors Conv2d::reference(Inputs in) const {
  const Specs specs{in[0].spec(), in[1].spec(), in[2].defined() ? in[2].spec() : Spec::none()};
  const Shape out = infer(specs)[0].shape, &w = in[1].shape();
  const std::int64_t taps = w[1] * w[2] * w[3];
  const Tensor windows = windows_of(rule, in[0], w[2], w[3], out[2], out[3]);
  if (rule.groups == 1)
    return {contiguous(permute(linear(windows, reshape(in[1], {w[0], taps}), in[2]), {0, 3, 1, 2}))};
  // A product for each group: (groups, rows, taps) times (groups, taps, outputs). With a bias 16-bit floats
  // are multiplied in f32, so that the sum is rounded once.
  const DType dtype = in[2].defined() ? compute_dtype(in[0].dtype()) : in[0].dtype();
  const Tensor right = permute(reshape(to(in[1], dtype), {rule.groups, w[0] / rule.groups, taps}), {0, 2, 1});
  const Tensor products = matmul(by_group(to(windows, dtype), rule.groups), right);
  const Tensor y = reshape(permute(products, {1, 0, 2}), {out[0], out[2], out[3], w[0]});
  const Tensor sum = in[2].defined() ? to(add(y, to(in[2], dtype)), in[0].dtype()) : y;
  return {contiguous(permute(sum, {0, 3, 1, 2}))};
}

Specs Conv2dGradInput::infer(SpecSpan in) const {
  return {{Shape{in[0].shape[0], in[1].shape[1] * rule.groups, rows, columns}, in[0].dtype, in[0].device}};
}

Tensors Conv2dGradInput::grad(const GradArgs& args) const {
  const Shape &g = args.specs[0].shape, &w = args.specs[1].shape;
  Tensors grads(3);
  if (args.need(0)) grads[0] = conv_like(g, rule, args.gy[0], args.inputs[1]);
  if (args.need(1)) grads[1] = apply(Conv2dGradWeight{rule, w[2], w[3]}, args.inputs[0], args.gy[0]);
  if (args.need(2)) grads[2] = sum(args.gy[0], {0, 2, 3});
  return grads;
}

Tensors Conv2dGradInput::reference(Inputs in) const {
  const Shape &g = in[0].shape(), &w = in[1].shape();
  // In f32 at least: each pixel is a sum over the taps that reach it, rounded once.
  const DType wide = compute_dtype(in[0].dtype());
  const Tensor gy = to(in[0], wide), weight = to(in[1], wide);
  if (in[2].defined()) {
    const Tensor images = apply(*this, gy, weight, Tensor{});
    return {to(add(images, reshape(to(in[2], wide), {-1, 1, 1})), in[0].dtype())};
  }
  const std::int64_t taps = w[1] * w[2] * w[3];
  const Tensor left = by_group(permute(gy, {0, 2, 3, 1}), rule.groups);
  const Tensor products = matmul(left, reshape(weight, {rule.groups, w[0] / rule.groups, taps}));
  const Tensor windows = reshape(permute(products, {1, 0, 2}), {g[0], g[2], g[3], rule.groups * taps});
  return {to(images_of(rule, windows, w[2], w[3], rows, columns), in[0].dtype())};
}

Specs Conv2dGradWeight::infer(SpecSpan in) const {
  return {{Shape{in[0].shape[1], in[1].shape[1] / rule.groups, height, width}, in[0].dtype, in[0].device}};
}

Tensors Conv2dGradWeight::grad(const GradArgs& args) const {
  const Shape &g = args.specs[0].shape, &x = args.specs[1].shape;
  Tensors grads(2);
  if (args.need(0)) grads[0] = conv_like(g, rule, args.inputs[1], args.gy[0]);
  if (args.need(1)) grads[1] = apply(Conv2dGradInput{rule, x[2], x[3]}, args.inputs[0], args.gy[0], Tensor{});
  return grads;
}

Tensors Conv2dGradWeight::reference(Inputs in) const {
  const Shape &g = in[0].shape(), &x = in[1].shape();
  const Tensor windows = by_group(windows_of(rule, in[1], height, width, g[2], g[3]), rule.groups);
  const Tensor left = by_group(permute(in[0], {0, 2, 3, 1}), rule.groups);
  return {reshape(matmul(transpose(left, 1, 2), windows), {g[1], x[1] / rule.groups, height, width})};
}

}  // namespace ops

Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias, const Conv2dOptions& o) {
  detail::check_given("conv2d", x, weight);
  const ops::ConvRule rule{{o.stride.down, o.padding.down, o.dilation.down},
                           {o.stride.across, o.padding.across, o.dilation.across},
                           o.groups};
  return apply(ops::Conv2d{rule}, x, weight, bias);
}

Tensor conv1d(const Tensor& x, const Tensor& weight, const Tensor& bias, const Conv1dOptions& o) {
  detail::check_given("conv1d", x, weight);
  check<ShapeError>(x.rank() == 3 && weight.rank() == 3 && weight.size(2) > 0,
                    "conv1d: input (N, C, L) and weight (out, C / groups, length), got {} and {}", x.shape(),
                    weight.shape());
  ops::check_channels("conv1d", x.spec(), weight.spec(), bias.defined() ? bias.spec() : Spec::none(),
                      o.groups);
  // An image of one row; the kernel moves along it alone.
  const ops::ConvRule rule{{}, {o.stride, o.padding, o.dilation}, o.groups};
  rule.across.check_for("conv1d");
  const std::int64_t length = x.size(2), kernel = weight.size(2);
  check<ShapeError>(length < ops::ConvRule::most && kernel < ops::ConvRule::most,
                    "conv1d: lines and kernels have below 2^31 pixels, got {} and {}", x.shape(), kernel);
  const std::int64_t padded = length + 2 * o.padding;
  check<ShapeError>(padded > 0 && (padded - 1) / o.dilation >= kernel - 1,
                    "conv1d: a kernel of {} spread by {} does not fit input {} padded by {}", kernel,
                    o.dilation, x.shape(), o.padding);
  return squeeze(apply(ops::Conv2d{rule}, unsqueeze(x, 2), unsqueeze(weight, 2), bias), 2);
}

}  // namespace sherd
