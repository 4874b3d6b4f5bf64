// Copies: between dtypes, layouts and devices.
#include "runtime/ops/copy.h"
#include "runtime/cuda/launchers.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops/cat.h"
#include "runtime/ops/slice.h"

namespace sherd::cuda {
namespace {

/// On one GPU, `from` broadcast to `to`'s shape.
void copy_on_device(std::string_view op, const Tensor& from, const Tensor& to) {
  if (to.numel() == 0) return;
  if (from.dtype() == to.dtype() && from.shape() == to.shape() && from.is_contiguous() && to.is_contiguous())
    return backend(DeviceType::cuda)
        .copy(to.raw(), to.device(), from.raw(), from.device(), static_cast<std::size_t>(to.spec().bytes()));
  Tensor out = to;
  launch_copy(plan(Inputs(&from, 1), Outputs(&out, 1)), to.dtype());
  check_launch(op);
}

void cast_kernel(const void*, Inputs in, Outputs out) { copy_on_device(ops::Cast::name, in[0], out[0]); }
void clone_kernel(const void*, Inputs in, Outputs out) { copy_on_device(ops::Clone::name, in[0], out[0]); }
void copy_into_kernel(const void*, Inputs in, Outputs) { copy_on_device(ops::CopyInto::name, in[1], in[0]); }

// Moving bytes needs no kernel, and writing into slices is made of ops: the host's way is right for every
// device.
template <class O>
void as_on_host(const void* op, Inputs in, Outputs out) {
  static_cast<const O*>(op)->run(Cpu{}, in, out);
}

}  // namespace

void add_copy_kernels(KernelTable& table) {
  table.add<ops::Cast>(cast_kernel);
  table.add<ops::Clone>(clone_kernel);
  table.add<ops::CopyInto>(copy_into_kernel);
  table.add<ops::Transfer>(as_on_host<ops::Transfer>);
  table.add<ops::Cat>(as_on_host<ops::Cat>);
  table.add<ops::Unslice>(as_on_host<ops::Unslice>);
}

}  // namespace sherd::cuda
