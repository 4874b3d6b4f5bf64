// Copies by the copy engines, which leave the multiprocessors to the rank's own work.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

namespace sherd::cuda {

/// Of memory that the current device can address, its own or a peer's; in no order among themselves.
struct EngineCopies {
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<std::size_t> bytes;

  void add(void* copy_to, const void* copy_from, std::size_t size) {
    to.push_back(copy_to);
    from.push_back(copy_from);
    bytes.push_back(size);
  }
};

/// In the order of `stream`, which does not record: with CUDA 13 in one call for all, else one by one.
void launch_copies(const EngineCopies& copies, cudaStream_t stream);

}  // namespace sherd::cuda
