// The largest elements along the last axis.
#include "runtime/ops/topk.h"

#include "runtime/cuda/rank.h"
#include "runtime/cuda/topk.h"
#include "runtime/ops.h"

namespace sherd::cuda {
namespace {

void topk(const ops::TopK& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor x = contiguous(in[0]);
  const std::int64_t columns = x.shape().back();
  launch_topk({x.dtype(), x.numel() / columns, columns, op.k, x.raw(), out[0].raw(),
               reinterpret_cast<std::int64_t*>(out[1].raw()), stream_of(x.device())});
  check_launch(op.name);
}

}  // namespace

void add_topk() { add_kernel<topk>(DeviceType::cuda); }

}  // namespace sherd::cuda
