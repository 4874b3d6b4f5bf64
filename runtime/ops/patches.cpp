#include "runtime/ops/patches.h"

#include "runtime/apply.h"
#include "runtime/cpu/patches.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {
namespace {

cpu::Windows describe(const PatchRule& rule, const Shape& images, const Shape& windows) {
  return {
      images[0],   images[1],   {images[2], images[3]}, {windows[1], windows[2]}, {rule.height, rule.width},
      rule.stride, rule.padding};
}

}  // namespace

Specs Patches::infer(SpecSpan in) const {
  const Spec& x = in[0];
  check<ValueError>(rule.stride > 0 && rule.padding >= 0, "conv2d: stride {} and padding {}", rule.stride,
                    rule.padding);
  const std::int64_t down = x.shape[2] + 2 * rule.padding - rule.height,
                     across = x.shape[3] + 2 * rule.padding - rule.width;
  check<ShapeError>(down >= 0 && across >= 0,
                    "conv2d: a kernel of {} x {} does not fit input {} padded by {}", rule.height, rule.width,
                    x.shape, rule.padding);
  return {{Shape{x.shape[0], down / rule.stride + 1, across / rule.stride + 1,
                 x.shape[1] * rule.height * rule.width},
           x.dtype, x.device}};
}

void Patches::run(Cpu, Inputs in, Outputs out) const {
  if (out[0].numel() == 0) return;
  const Tensor x = contiguous(in[0]);
  dispatch_floating(name, x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    cpu::gather_windows(describe(rule, x.shape(), out[0].shape()), x.data<T>(),
                        reinterpret_cast<T*>(out[0].raw()));
  });
}

Tensors Patches::grad(const GradArgs& args) const {
  const Shape& images = args.specs[0].shape;
  return {apply(PatchesGrad{rule, images[2], images[3]}, args.gy[0])};
}

Specs PatchesGrad::infer(SpecSpan in) const {
  const Shape& s = in[0].shape;
  return {{Shape{s[0], s[3] / (rule.height * rule.width), rows, columns}, in[0].dtype, in[0].device}};
}

void PatchesGrad::run(Cpu, Inputs in, Outputs out) const {
  if (out[0].numel() == 0) return;
  const Tensor windows = contiguous(in[0]);
  dispatch_floating(name, windows.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    cpu::sum_windows(describe(rule, out[0].shape(), windows.shape()), windows.data<T>(),
                     reinterpret_cast<T*>(out[0].raw()));
  });
}

Tensors PatchesGrad::grad(const GradArgs& args) const { return {apply(Patches{rule}, args.gy[0])}; }

}  // namespace ops

Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias, Conv2dOptions options) {
  const Shape &in = x.shape(), &w = weight.shape();
  check<DTypeError>(is_floating(x.dtype()), "conv2d: takes floating dtypes, got {}; cast the input first",
                    name_of(x.dtype()));
  check<DTypeError>(weight.dtype() == x.dtype(), "conv2d: input is {} and its weight {}; cast one of them",
                    name_of(x.dtype()), name_of(weight.dtype()));
  check<ShapeError>(in.rank() == 4 && w.rank() == 4 && in[1] == w[1] && w[2] > 0 && w[3] > 0,
                    "conv2d: input (N, C, H, W) and weight (out, C, height, width), got {} and {}", in, w);
  check<ShapeError>(!bias.defined() || bias.shape() == Shape{w[0]}, "conv2d: bias of shape {} for {} outputs",
                    bias.defined() ? bias.shape() : Shape{}, w[0]);
  const Tensor windows = apply(ops::Patches{{w[2], w[3], options.stride, options.padding}}, x);
  const Tensor y = linear(windows, reshape(weight, {w[0], w[1] * w[2] * w[3]}), bias);
  return contiguous(permute(y, {0, 3, 1, 2}));
}

}  // namespace sherd
