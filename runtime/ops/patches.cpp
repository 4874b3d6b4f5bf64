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
}  // namespace sherd
