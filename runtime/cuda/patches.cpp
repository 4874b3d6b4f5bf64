// A convolution's windows as rows.
#include "runtime/ops/patches.h"

#include "runtime/cuda/patches.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"

namespace sherd::cuda {
namespace {

PatchesCall describe(const ops::PatchRule& rule, const Tensor& images, const Tensor& windows) {
  const Shape &i = images.shape(), &w = windows.shape();
  return {images.dtype(), i[0],        i[1], {i[2], i[3]}, {w[1], w[2]}, {rule.height, rule.width},
          rule.stride,    rule.padding};
}

void run(std::string_view op, PatchesCall call, const Tensor& from, const Tensor& to,
         void (*launch)(const PatchesCall&)) {
  call.from = from.raw();
  call.to = to.raw();
  call.stream = stream_of(to.device());
  launch(call);
  check_launch(op);
}

void patches(const ops::Patches& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor x = contiguous(in[0]);
  run(op.name, describe(op.rule, x, out[0]), x, out[0], launch_patches);
}

void patches_grad(const ops::PatchesGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor windows = contiguous(in[0]);
  run(op.name, describe(op.rule, out[0], windows), windows, out[0], launch_patches_grad);
}

}  // namespace

void add_patches() {
  add_kernel<patches>(DeviceType::cuda);
  add_kernel<patches_grad>(DeviceType::cuda);
}

}  // namespace sherd::cuda
