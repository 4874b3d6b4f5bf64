// Copies: between dtypes, layouts and devices.
#include "runtime/ops/copy.h"

#include "runtime/cuda/channels_last.h"
#include "runtime/cuda/image_order.h"
#include "runtime/cuda/launchers.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops/cat.h"

namespace sherd::cuda {
namespace {

/// Between the two orders of 16-bit images, tile by tile; false where it is none of that.
bool copy_images(const Tensor& from, const Tensor& to) {
  const auto aligned = [](const Tensor& t) { return reinterpret_cast<std::uintptr_t>(t.raw()) % 16 == 0; };
  if (!lies_across(from, to) || from.dtype() != to.dtype() || !aligned(from) || !aligned(to)) return false;
  const std::int64_t images = to.shape()[0], channels = to.shape()[1];
  (is_channels_last(from) ? launch_channels_first : launch_channels_last)({{1, images, images},
                                                                           {1, channels, channels},
                                                                           to.numel() / (images * channels),
                                                                           from.raw(),
                                                                           to.raw(),
                                                                           stream_of(to.device())});
  return true;
}

/// On one GPU, `from` broadcast to `to`'s shape.
void copy_on_device(std::string_view op, const Tensor& from, const Tensor& to) {
  if (to.numel() == 0) return;
  if (from.dtype() == to.dtype() && from.shape() == to.shape() && from.is_contiguous() && to.is_contiguous())
    return backend(DeviceType::cuda)
        .copy(to.raw(), to.device(), from.raw(), from.device(), static_cast<std::size_t>(to.spec().bytes()));
  Tensor out = to;
  if (!copy_images(from, to)) launch_copy(operands_as_they_lie(Inputs(&from, 1), Outputs(&out, 1)));
  check_launch(op);
}

void cast_kernel(const void*, Inputs in, Outputs out) {
  follow_operands(in, out[0]);
  copy_on_device(ops::Cast::name, in[0], out[0]);
}
void cat_kernel(const void* erased, Inputs in, Outputs out) {
  join_channels_last(in, out[0]);
  static_cast<const ops::Cat*>(erased)->run(in, out);
}
void clone_kernel(const void*, Inputs in, Outputs out) { copy_on_device(ops::Clone::name, in[0], out[0]); }
void copy_into_kernel(const void*, Inputs in, Outputs) { copy_on_device(ops::CopyInto::name, in[1], in[0]); }

/// Copies that read the elements one after another as they write them go together; others alone.
void copy_each_kernel(const void*, Inputs in, Outputs) {
  const cudaStream_t stream = stream_of(in[0].device());
  CopySlots slots;
  const auto launch = [&] {
    launch_copy_each(slots, stream);
    check_launch(ops::CopyEach::name);
    slots = {};
  };
  for (std::size_t i = 0; i < in.size(); i += 2) {
    const Tensor &to = in[i], &from = in[i + 1];
    if (to.is_contiguous() && from.is_contiguous() && takes_copy(to.dtype(), from.dtype())) {
      slots.add({to.raw(), from.raw(), to.numel(), to.dtype(), from.dtype()});
      if (slots.count == CopySlots::most) launch();
    } else {
      copy_on_device(ops::CopyEach::name, from, to);
    }
  }
  launch();
}

}  // namespace

void add_copy() {
  kernel_row<ops::Cast>().set(DeviceType::cuda, cast_kernel);
  kernel_row<ops::Clone>().set(DeviceType::cuda, clone_kernel);
  kernel_row<ops::CopyInto>().set(DeviceType::cuda, copy_into_kernel);
  kernel_row<ops::CopyEach>().set(DeviceType::cuda, copy_each_kernel);
  kernel_row<ops::Cat>().set(DeviceType::cuda, cat_kernel);
}

}  // namespace sherd::cuda
