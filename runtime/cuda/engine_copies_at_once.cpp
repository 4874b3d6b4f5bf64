#include "runtime/cuda/check.h"
#include "runtime/cuda/engine_copies.h"

namespace sherd::cuda {

void launch_copies(const EngineCopies& copies, cudaStream_t stream) {
  if (copies.to.empty()) return;
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  std::size_t first = 0;
  check_cuda(cudaMemcpyBatchAsync(copies.to.data(), copies.from.data(), copies.bytes.data(), copies.to.size(),
                                  &attributes, &first, 1, stream),
             "cuda peers");
}

}  // namespace sherd::cuda
