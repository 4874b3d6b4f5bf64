// The order-free norm of lists of tensors, and its clipping.
#include "runtime/cuda/norm.h"

#include <vector>

#include "runtime/cuda/rank.h"
#include "runtime/list_step.h"
#include "runtime/ops.h"
#include "runtime/ops/order_free_norm.h"

namespace sherd::cuda {
namespace {

/// Calls `launch(list)` for the tensors by dtype, as many at a time as one launch takes.
template <class F>
void in_lists(std::span<const Tensor> tensors, F&& launch) {
  for (const DType dtype : all_dtypes) {
    ValueList list;
    list.dtype = dtype;
    for (const Tensor& t : tensors) {
      if (t.dtype() != dtype || t.numel() == 0) continue;
      list.add(t.raw(), t.numel());
      if (!list.full()) continue;
      launch(list);
      list.count = 0;
    }
    if (list.count > 0) launch(list);
  }
}

std::vector<Tensor> dense(Inputs tensors) {
  std::vector<Tensor> list;
  for (const Tensor& t : tensors) list.push_back(contiguous(t));
  return list;
}

double* scalar(const Tensor& t) { return reinterpret_cast<double*>(t.raw()); }

void largest_magnitude(const ops::LargestMagnitude& op, Inputs in, Outputs out) {
  zero_(alias(out[0], out[0].layout()));
  const cudaStream_t stream = stream_of(out[0].device());
  in_lists(dense(in), [&](const ValueList& list) { launch_largest_magnitude(list, scalar(out[0]), stream); });
  check_launch(op.name);
}

void square_sums(const ops::SquareSums& op, Inputs in, Outputs out) {
  zero_(alias(out[0], out[0].layout()));
  const cudaStream_t stream = stream_of(out[0].device());
  auto* limbs = reinterpret_cast<std::int64_t*>(out[0].raw());
  in_lists(dense(in), [&](const ValueList& list) { launch_square_sums(list, limbs, stream); });
  check_launch(op.name);
}

void norm_of_sums(const ops::NormOfSums& op, Inputs in, Outputs out) {
  const Tensor sums = contiguous(in[0]);
  launch_norm_of_sums(reinterpret_cast<const std::int64_t*>(sums.raw()), scalar(out[0]),
                      stream_of(out[0].device()));
  check_launch(op.name);
}

void clip_scale(const ops::ClipScale& op, Inputs in, Outputs) {
  for (const Tensor& t : in.subspan(1)) sherd::detail::dense_data(op.name, t);
  const cudaStream_t stream = stream_of(in[0].device());
  in_lists(in.subspan(1),
           [&](const ValueList& list) { launch_clip_scale(list, op.limit, scalar(in[0]), stream); });
  check_launch(op.name);
}

}  // namespace

void add_norm() {
  add_kernel<largest_magnitude>(DeviceType::cuda);
  add_kernel<square_sums>(DeviceType::cuda);
  add_kernel<norm_of_sums>(DeviceType::cuda);
  add_kernel<clip_scale>(DeviceType::cuda);
}

}  // namespace sherd::cuda
