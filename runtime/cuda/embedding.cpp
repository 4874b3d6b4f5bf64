// Rows of a table by index.
#include "runtime/ops/embedding.h"

#include "runtime/cuda/embedding.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"

namespace sherd::cuda {
namespace {

const std::int64_t* integers(const Tensor& t) { return reinterpret_cast<const std::int64_t*>(t.raw()); }

void embedding(const ops::Embedding& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor table = contiguous(in[0]), index = contiguous(in[1]);
  DeviceState& state = state_of(table.device());
  launch_embedding({table.shape()[0], out[0].spec().bytes() / index.numel(), index.numel(), table.raw(),
                    integers(index), out[0].raw(), state.faults(), state.stream()});
  check_launch(op.name);
}

void embedding_grad(const ops::EmbeddingGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor gy = contiguous(in[0]), index = contiguous(in[1]);
  EmbeddingGradCall call{gy.dtype(),      op.rows,      out[0].numel() / op.rows, index.numel(), gy.raw(),
                         integers(index), out[0].raw(), stream_of(gy.device())};
  check<ValueError>(index.numel() < std::int64_t{1} << 31 && op.rows < std::int64_t{1} << 31,
                    "{}: {} positions in a table of {} rows are more than 2^31; take them in parts", op.name,
                    index.numel(), op.rows);
  const Tensor scratch =
      empty(Shape{static_cast<std::int64_t>(call.scratch_bytes())}, {DType::u8, gy.device()});
  call.scratch = scratch.raw();
  launch_embedding_grad(call);
  check_launch(op.name);
}

}  // namespace

void add_embedding() {
  add_kernel<embedding>(DeviceType::cuda);
  add_kernel<embedding_grad>(DeviceType::cuda);
}

}  // namespace sherd::cuda
