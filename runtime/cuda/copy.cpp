// Copies: between dtypes, layouts and devices.
#include "runtime/ops/copy.h"
#include "runtime/cuda/launchers.h"
#include "runtime/cuda/rank.h"

namespace sherd::cuda {
namespace {

/// On one GPU, `from` broadcast to `to`'s shape.
void copy_on_device(std::string_view op, const Tensor& from, const Tensor& to) {
  if (to.numel() == 0) return;
  if (from.dtype() == to.dtype() && from.shape() == to.shape() && from.is_contiguous() && to.is_contiguous())
    return backend(DeviceType::cuda)
        .copy(to.raw(), to.device(), from.raw(), from.device(), static_cast<std::size_t>(to.spec().bytes()));
  Tensor out = to;
  launch_copy(operands_of(Inputs(&from, 1), Outputs(&out, 1)), to.dtype());
  check_launch(op);
}

void cast_kernel(const void*, Inputs in, Outputs out) { copy_on_device(ops::Cast::name, in[0], out[0]); }
void clone_kernel(const void*, Inputs in, Outputs out) { copy_on_device(ops::Clone::name, in[0], out[0]); }
void copy_into_kernel(const void*, Inputs in, Outputs) { copy_on_device(ops::CopyInto::name, in[1], in[0]); }

}  // namespace

void add_copy() {
  kernel_row<ops::Cast>().set(DeviceType::cuda, cast_kernel);
  kernel_row<ops::Clone>().set(DeviceType::cuda, clone_kernel);
  kernel_row<ops::CopyInto>().set(DeviceType::cuda, copy_into_kernel);
}

}  // namespace sherd::cuda
