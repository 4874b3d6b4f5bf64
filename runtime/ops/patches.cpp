#include "runtime/ops/patches.h"

#include "runtime/apply.h"
#include "runtime/ops.h"
#include "runtime/ops/slice.h"

namespace sherd {
namespace ops {
Specs Patches::infer(SpecSpan in) const {
  const Spec& x = in[0];
  check<DTypeError>(is_floating(x.dtype), "conv2d: takes floating dtypes, got {}; cast the input first",
                    name_of(x.dtype));
  check<ShapeError>(x.shape.rank() == 4 && rule.height > 0 && rule.width > 0,
                    "conv2d: input (N, C, H, W) and a kernel of at least one pixel, got {} and {} x {}",
                    x.shape, rule.height, rule.width);
  constexpr std::int64_t most = std::int64_t{1} << 31;  // so that no sum or product of sizes below wraps
  check<ValueError>(rule.stride > 0 && rule.padding >= 0 && rule.padding < most,
                    "conv2d: stride {} must be at least 1, and padding {} at least 0 and below 2^31",
                    rule.stride, rule.padding);
  check<ShapeError>(rule.height < most && rule.width < most && x.shape[2] < most && x.shape[3] < most,
                    "conv2d: images and kernels have below 2^31 pixels a side, got {} and {} x {}", x.shape,
                    rule.height, rule.width);
  const std::int64_t down = x.shape[2] + 2 * rule.padding - rule.height,
                     across = x.shape[3] + 2 * rule.padding - rule.width;
  check<ShapeError>(down >= 0 && across >= 0,
                    "conv2d: a kernel of {} x {} does not fit input {} padded by {}", rule.height, rule.width,
                    x.shape, rule.padding);
  return {{Shape{x.shape[0], down / rule.stride + 1, across / rule.stride + 1,
                 x.shape[1] * rule.height * rule.width},
           x.dtype, x.device}};
}

Tensors Patches::reference(Inputs in) const {
  const Tensor& x = in[0];
  const Shape out = infer(Specs{x.spec()})[0].shape;
  const std::int64_t p = rule.padding, h = x.shape()[2], w = x.shape()[3];
  Tensor padded = x;
  if (p > 0) padded = apply(Unslice{{3, p, 1, w}, w + 2 * p}, apply(Unslice{{2, p, 1, h}, h + 2 * p}, x));
  std::vector<Tensor> taps;  // (N, C, down, across) each
  for (std::int64_t i = 0; i < rule.height; ++i)
    for (std::int64_t j = 0; j < rule.width; ++j)
      taps.push_back(
          apply(Slice{3, j, rule.stride, out[2]}, apply(Slice{2, i, rule.stride, out[1]}, padded)));
  return {reshape(permute(stack(taps, 4), {0, 2, 3, 1, 4}), out)};
}

Tensors Patches::grad(const GradArgs& args) const {
  const Shape& images = args.specs[0].shape;
  return {apply(PatchesGrad{rule, images[2], images[3]}, args.gy[0])};
}

Specs PatchesGrad::infer(SpecSpan in) const {
  const Shape& s = in[0].shape;
  check<ShapeError>(
      s.rank() == 4 && rule.height > 0 && rule.width > 0 && s[3] % (rule.height * rule.width) == 0,
      "patches_grad: windows of shape {} do not hold {} x {} pixels each", s, rule.height, rule.width);
  return {{Shape{s[0], s[3] / (rule.height * rule.width), rows, columns}, in[0].dtype, in[0].device}};
}

Tensors PatchesGrad::reference(Inputs in) const {
  const Shape& s = in[0].shape();
  const std::int64_t p = rule.padding, h = rows + 2 * p, w = columns + 2 * p, taps = rule.height * rule.width;
  const DType wide = in[0].dtype() == DType::f64 ? DType::f64 : DType::f32;
  const Tensor windows =
      permute(reshape(to(in[0], wide), {s[0], s[1], s[2], s[3] / taps, taps}), {4, 0, 3, 1, 2});
  Tensor total = zeros({s[0], s[3] / taps, h, w}, {wide, in[0].device()});
  for (std::int64_t i = 0; i < rule.height; ++i)
    for (std::int64_t j = 0; j < rule.width; ++j) {
      const Tensor tap = select(windows, 0, i * rule.width + j);
      total = add(total, apply(Unslice{{2, i, rule.stride, s[1]}, h},
                               apply(Unslice{{3, j, rule.stride, s[2]}, w}, tap)));
    }
  return {to(narrow(narrow(total, 2, p, rows), 3, p, columns), in[0].dtype())};
}

Tensors PatchesGrad::grad(const GradArgs& args) const { return {apply(Patches{rule}, args.gy[0])}; }

}  // namespace ops

namespace {

/// Windows as `Patches` gives them, of any stride and dilation: one slice for each place of the kernel.
Tensor windows_by_slices(const Tensor& x, PerAxis kernel, PerAxis stride, PerAxis dilation) {
  const std::int64_t down = (x.shape()[2] - (kernel.down - 1) * dilation.down - 1) / stride.down + 1,
                     across = (x.shape()[3] - (kernel.across - 1) * dilation.across - 1) / stride.across + 1;
  std::vector<Tensor> taps;  // (N, C, down, across) each
  for (std::int64_t i = 0; i < kernel.down; ++i)
    for (std::int64_t j = 0; j < kernel.across; ++j)
      taps.push_back(apply(ops::Slice{3, j * dilation.across, stride.across, across},
                           apply(ops::Slice{2, i * dilation.down, stride.down, down}, x)));
  const Tensor windows = permute(stack(taps, 4), {0, 2, 3, 1, 4});
  return reshape(windows, {x.shape()[0], down, across, x.shape()[1] * kernel.down * kernel.across});
}

void check_conv(std::string_view call, std::int64_t stride, std::int64_t padding, std::int64_t dilation) {
  constexpr std::int64_t most = std::int64_t{1} << 31;
  check<ValueError>(stride > 0 && padding >= 0 && padding < most && dilation > 0 && dilation < most,
                    "{}: stride {} must be at least 1, padding {} at least 0 and dilation {} at least 1, the "
                    "last two below 2^31",
                    call, stride, padding, dilation);
}

}  // namespace

Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias, const Conv2dOptions& o) {
  const Shape &in = x.shape(), &w = weight.shape();
  check<DTypeError>(is_floating(x.dtype()), "conv2d: takes floating dtypes, got {}; cast the input first",
                    name_of(x.dtype()));
  check<DTypeError>(weight.dtype() == x.dtype(), "conv2d: input is {} and its weight {}; cast one of them",
                    name_of(x.dtype()), name_of(weight.dtype()));
  check<ValueError>(o.groups > 0, "conv2d: {} groups; at least one", o.groups);
  check<ShapeError>(
      in.rank() == 4 && w.rank() == 4 && in[1] % o.groups == 0 && in[1] / o.groups == w[1] &&
          w[0] % o.groups == 0 && w[2] > 0 && w[3] > 0,
      "conv2d: input (N, C, H, W) and weight (out, C / groups, height, width) of {} groups, got "
      "{} and {}",
      o.groups, in, w);
  check<ShapeError>(!bias.defined() || bias.shape() == Shape{w[0]}, "conv2d: bias of shape {} for {} outputs",
                    bias.defined() ? bias.shape() : Shape{}, w[0]);
  check_conv("conv2d", o.stride.down, o.padding.down, o.dilation.down);
  check_conv("conv2d", o.stride.across, o.padding.across, o.dilation.across);
  const bool even = o.stride.down == o.stride.across && o.dilation == PerAxis(1);
  const bool padded = even && o.padding.down == o.padding.across;  // by the op itself
  Tensor image = x;
  if (!padded && o.padding != PerAxis(0))
    image = pad(x, {o.padding.across, o.padding.across, o.padding.down, o.padding.down});
  if (!even) {
    const Shape& s = image.shape();
    check<ShapeError>((s[2] - 1) / o.dilation.down >= w[2] - 1 &&
                          (s[3] - 1) / o.dilation.across >= w[3] - 1 && s[2] > 0 && s[3] > 0,
                      "conv2d: a kernel of {} x {} spread by {} and {} does not fit padded input {}", w[2],
                      w[3], o.dilation.down, o.dilation.across, s);
  }
  const Tensor windows =
      even ? apply(ops::Patches{{w[2], w[3], o.stride.down, padded ? o.padding.down : 0}}, image)
           : windows_by_slices(image, {w[2], w[3]}, o.stride, o.dilation);
  const std::int64_t taps = w[1] * w[2] * w[3];
  if (o.groups == 1)
    return contiguous(permute(linear(windows, reshape(weight, {w[0], taps}), bias), {0, 3, 1, 2}));
  // A product for each group: (groups, rows, taps) times (groups, taps, outputs). With a bias 16-bit floats
  // are multiplied in f32, so that the sum is rounded once.
  const Shape& s = windows.shape();
  const std::int64_t rows = s[0] * s[1] * s[2], outputs = w[0] / o.groups;
  const DType dtype = bias.defined() ? compute_dtype(x.dtype()) : x.dtype();
  const Tensor left = permute(reshape(to(windows, dtype), {rows, o.groups, taps}), {1, 0, 2});
  const Tensor right = permute(reshape(to(weight, dtype), {o.groups, outputs, taps}), {0, 2, 1});
  const Tensor y = reshape(permute(matmul(left, right), {1, 0, 2}), {s[0], s[1], s[2], w[0]});
  const Tensor sum = bias.defined() ? to(add(y, to(bias, dtype)), x.dtype()) : y;
  return contiguous(permute(sum, {0, 3, 1, 2}));
}

Tensor conv1d(const Tensor& x, const Tensor& weight, const Tensor& bias, const Conv1dOptions& o) {
  check<ShapeError>(x.rank() == 3 && weight.rank() == 3,
                    "conv1d: input (N, C, L) and weight (out, C / groups, length), got {} and {}", x.shape(),
                    weight.shape());
  check_conv("conv1d", o.stride, o.padding, o.dilation);
  // An image of one row; the kernel moves along it alone.
  return squeeze(conv2d(unsqueeze(x, 2), unsqueeze(weight, 2), bias,
                        {o.stride, {0, o.padding}, {1, o.dilation}, o.groups}),
                 2);
}

}  // namespace sherd
