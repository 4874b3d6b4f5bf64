#include "runtime/cuda/loss_total.cuh"
#include "runtime/ops/elementwise_list.h"

namespace sherd::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(threads_per_block)
    join_chunks(const double* partial, std::int64_t count, double by, T* out) {
  double total = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += threads_per_block) total += partial[i];
  total = detail::block_sum(total);
  if (threadIdx.x == 0) *out = narrow<T>(static_cast<compute_t<T>>(total) / static_cast<compute_t<T>>(by));
}

}  // namespace

void launch_join_chunks(const LossCall& c, const double* partial, void* out) {
  for_floating(c.dtype, [&]<class T>() {
    join_chunks<T><<<1, threads_per_block, 0, c.stream>>>(
        partial, c.chunks(), c.mean ? static_cast<double>(c.n) : 1, static_cast<T*>(out));
  });
}

void add_loss_total() {
  ops::SummedLosses::for_each([&]<class Loss>() { detail::add_loss_total<Loss>(); });
}

}  // namespace sherd::cuda
