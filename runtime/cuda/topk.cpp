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
  const TopKCall call{x.dtype(),
                      x.numel() / columns,
                      columns,
                      op.k,
                      x.raw(),
                      out[0].raw(),
                      reinterpret_cast<std::int64_t*>(out[1].raw()),
                      stream_of(x.device())};
  constexpr std::int64_t few = 32;
  if (op.k <= few || columns > std::int64_t{1} << 31) {
    launch_topk(call);
  } else {
    SortCall sort{call};
    const Tensor scratch = empty(Shape{sort.scratch_bytes()}, {DType::u8, x.device()});
    sort.scratch = scratch.raw();
    launch_sort(sort);
  }
  check_launch(op.name);
}

}  // namespace

void add_topk() { add_kernel<topk>(DeviceType::cuda); }

}  // namespace sherd::cuda
