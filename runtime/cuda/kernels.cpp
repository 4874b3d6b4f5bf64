#include "runtime/cuda/kernels.h"

#include <algorithm>

#include "runtime/cpu/elementwise_loop.h"
#include "runtime/cuda/check.h"
#include "runtime/cuda/rank.h"

namespace sherd::cuda {

static_assert(Plan::most_dims == max_rank && Plan::most_operands == detail::Walk::most);

Plan plan(Inputs in, Outputs out) {
  Plan p;
  const Tensor& y = out[0];
  p.dtype = in.empty() ? y.dtype() : in.back().dtype();
  p.numel = y.numel();
  if (p.numel == 0) return p;
  p.stream = stream_of(y.device());
  const detail::Walk walk = detail::plan_walk(in, y);
  p.rank = walk.rank;
  p.dense = walk.rank <= 1;
  std::copy_n(walk.sizes, walk.rank, p.sizes);
  for (int k = 0; k < walk.operands; ++k) {
    p.data[k] = walk.data[k];
    std::copy_n(walk.strides[k], walk.rank, p.strides[k]);
    const bool aligned = reinterpret_cast<std::uintptr_t>(p.data[k]) % 16 == 0;
    p.dense = p.dense && aligned && (walk.rank == 0 || walk.strides[k][0] == 1);
  }
  return p;
}

void check_launch(std::string_view op) { check_cuda(cudaGetLastError(), op); }

}  // namespace sherd::cuda
