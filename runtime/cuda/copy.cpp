// Copies: between dtypes, layouts and devices.
#include "runtime/ops/copy.h"

#include <optional>

#include "runtime/cuda/channels_last.h"
#include "runtime/cuda/image_order.h"
#include "runtime/cuda/launchers.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
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

/// Dense copies that are launched together.
struct CopyList {
  std::string_view op;
  cudaStream_t stream;
  CopySlots slots{};

  void add(const CopySlot& slot) {
    slots.add(slot);
    if (slots.count == CopySlots::most) launch();
  }
  void launch() {
    launch_copy_each(slots, stream);
    check_launch(op);
    slots = {};
  }
};

void cast_kernel(const void*, Inputs in, Outputs out) {
  follow_operands(in, out[0]);
  copy_on_device(ops::Cast::name, in[0], out[0]);
}

/// Whether `parts`, joined along `axis`, lie one after another, and are so short that launches count.
bool lie_in_a_row(Inputs parts, const Tensor& out, int axis) {
  constexpr std::int64_t most_bytes = 16 << 20;
  bool row = out.is_contiguous() && out.spec().bytes() <= most_bytes;
  for (int i = 0; i < axis; ++i) row = row && out.shape()[i] == 1;
  for (const Tensor& part : parts) row = row && part.is_contiguous();
  return row;
}

/// Elements from one row of `x` to the next, a row being all from `axis` on; none where those have holes or
/// lie unevenly.
std::optional<std::int64_t> pitch_from(const Tensor& x, int axis) {
  std::int64_t length = 1, rows = 1, pitch = 0;
  for (int i = x.rank() - 1; i >= 0; --i) {
    const std::int64_t size = x.shape()[i], stride = x.strides()[i];
    if (size == 1) continue;
    if (i < axis && rows == 1) pitch = stride;
    if (stride != (i < axis ? pitch * rows : length)) return {};
    (i < axis ? rows : length) *= size;
  }
  return pitch;
}

/// Joins few bytes, which launches take longer than, in one; false where it is none of that.
bool join_at_once(Inputs parts, const Tensor& out, int axis) {
  constexpr std::int64_t most_bytes = 8 << 20;
  if (parts.size() > JoinCall::most || out.numel() == 0 || out.spec().bytes() > most_bytes ||
      !out.is_contiguous())
    return false;
  JoinCall call{.bytes = size_of(out.dtype()), .y = out.raw()};
  for (int i = 0; i < axis; ++i) call.rows *= out.shape()[i];
  call.columns = out.numel() / call.rows;
  std::int64_t first = 0;
  for (const Tensor& part : parts) {
    if (part.numel() == 0) continue;
    const std::optional<std::int64_t> pitch = pitch_from(part, axis);
    if (!pitch) return false;
    const std::int64_t length = part.numel() / call.rows;
    call.part[call.count++] = {part.raw(), *pitch, length, first};
    first += length;
  }
  call.stream = stream_of(out.device());
  launch_join(call);
  check_launch(ops::Cat::name);
  return true;
}

void cat_kernel(const void* erased, Inputs in, Outputs out) {
  const auto& op = *static_cast<const ops::Cat*>(erased);
  join_channels_last(in, out[0]);
  if (!lie_in_a_row(in, out[0], op.axis)) {
    if (!join_at_once(in, out[0], op.axis)) op.run(in, out);
    return;
  }
  std::byte* to = out[0].raw();
  CopyList list{op.name, stream_of(out[0].device())};
  for (const Tensor& part : in) {
    if (part.numel() > 0) list.add({to, part.raw(), part.numel(), part.dtype(), part.dtype()});
    to += part.spec().bytes();
  }
  list.launch();
}

/// In words as wide as all lines and the step allow.
void roll_kernel(const void* erased, Inputs in, Outputs out) {
  const auto& op = *static_cast<const ops::Roll*>(erased);
  const Tensor x = contiguous(in[0]);
  if (x.numel() == 0) return;
  RollCall call{.bytes = size_of(x.dtype()), .x = x.raw(), .y = out[0].raw()};
  std::int64_t inner = 1;
  for (int i = op.axis + 1; i < x.rank(); ++i) inner *= x.shape()[i];
  call.length = x.rank() == 0 ? 1 : x.shape()[op.axis] * inner;
  call.by = op.by * inner;
  call.lines = x.numel() / call.length;
  const auto ends = [&] {
    return reinterpret_cast<std::uintptr_t>(call.x) | reinterpret_cast<std::uintptr_t>(call.y) |
           static_cast<std::uintptr_t>((call.length | call.by) * call.bytes);
  };
  while (call.bytes < 16 && ends() % static_cast<std::uintptr_t>(2 * call.bytes) == 0)
    call.bytes *= 2, call.length /= 2, call.by /= 2;
  call.stream = stream_of(x.device());
  launch_roll(call);
  check_launch(op.name);
}
void clone_kernel(const void*, Inputs in, Outputs out) { copy_on_device(ops::Clone::name, in[0], out[0]); }
void copy_into_kernel(const void*, Inputs in, Outputs) { copy_on_device(ops::CopyInto::name, in[1], in[0]); }

/// Copies that read the elements one after another as they write them go together; others alone.
void copy_each_kernel(const void*, Inputs in, Outputs) {
  CopyList list{ops::CopyEach::name, stream_of(in[0].device())};
  for (std::size_t i = 0; i < in.size(); i += 2) {
    const Tensor &to = in[i], &from = in[i + 1];
    if (to.is_contiguous() && from.is_contiguous() && takes_copy(to.dtype(), from.dtype())) {
      list.add({to.raw(), from.raw(), to.numel(), to.dtype(), from.dtype()});
    } else {
      copy_on_device(ops::CopyEach::name, from, to);
    }
  }
  list.launch();
}

}  // namespace

void add_copy() {
  kernel_row<ops::Cast>().set(DeviceType::cuda, cast_kernel);
  kernel_row<ops::Clone>().set(DeviceType::cuda, clone_kernel);
  kernel_row<ops::CopyInto>().set(DeviceType::cuda, copy_into_kernel);
  kernel_row<ops::CopyEach>().set(DeviceType::cuda, copy_each_kernel);
  kernel_row<ops::Roll>().set(DeviceType::cuda, roll_kernel);
  kernel_row<ops::Cat>().set(DeviceType::cuda, cat_kernel);
}

}  // namespace sherd::cuda
