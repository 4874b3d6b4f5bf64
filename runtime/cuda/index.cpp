// Places where bools hold, and elements written by a mask.
#include "runtime/cuda/index.h"

#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/ops/index.h"

namespace sherd::cuda {
namespace {

void places(const ops::Places& op, Inputs in, Outputs out) {
  if (op.count == 0) return;
  PlacesCall call;
  call.mask = reinterpret_cast<const bool*>(in[0].raw());
  call.n = in[0].numel();
  const Tensor counts = empty({call.chunks()}, {DType::i64, in[0].device()});
  call.counts = reinterpret_cast<std::int64_t*>(counts.raw());
  call.places = reinterpret_cast<std::int64_t*>(out[0].raw());
  call.stream = stream_of(in[0].device());
  launch_count_places(call);
  const Tensor sums = cumsum(counts, 0);
  call.counts = reinterpret_cast<std::int64_t*>(sums.raw());
  launch_write_places(call);
  check_launch(op.name);
}

void fill_where(const ops::FillWhere& op, Inputs in, Outputs out) {
  const Tensor& x = out[0];
  if (x.numel() == 0) return;
  const Tensor mask = contiguous(expand(in[1], x.shape())), all = x.is_contiguous() ? x : clone(x);
  launch_fill_where({reinterpret_cast<const bool*>(mask.raw()), x.numel(), size_of(x.dtype()), in[2].raw(),
                     all.raw(), stream_of(x.device())});
  check_launch(op.name);
  if (!all.is(x)) copy_(alias(x, x.layout()), all);
}

}  // namespace

void add_index() {
  add_kernel<places>(DeviceType::cuda);
  add_kernel<fill_where>(DeviceType::cuda);
}

}  // namespace sherd::cuda
