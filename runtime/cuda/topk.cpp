// The largest elements along the last axis.
#include "runtime/ops/topk.h"

#include "runtime/cuda/rank.h"
#include "runtime/cuda/sort.h"
#include "runtime/cuda/topk.h"
#include "runtime/ops.h"

namespace sherd::cuda {
namespace {

void topk(const ops::TopK& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor x = contiguous(in[0]);
  const std::int64_t columns = x.shape().back();
  SortCall call{x.dtype(),
                x.numel() / columns,
                columns,
                op.k,
                x.raw(),
                out[0].raw(),
                reinterpret_cast<std::int64_t*>(out[1].raw()),
                stream_of(x.device())};
  Tensor scratch;
  if (columns <= std::int64_t{1} << 31) {
    scratch = empty(Shape{call.scratch_bytes()}, {DType::u8, x.device()});
    call.scratch = scratch.raw();
    launch_sort(call);
  } else {
    launch_topk(call);
  }
  check_launch(op.name);
}

}  // namespace

void add_topk() { add_kernel<topk>(DeviceType::cuda); }

}  // namespace sherd::cuda
