// The driver's memory for what graphs make on their way: one pool a GPU, for the graphs of all ranks there.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <mutex>
#include <shared_mutex>

namespace sherd::cuda {

/// Who uses that pool of one GPU. It is trimmed only while no thread makes, launches or runs a graph there.
/// Without that replays of ranks that shared a GPU were seen to go wrong; that this is the cause is not proved.
class GraphMemory {
 public:
  /// Never destroyed: graphs may end after `main`.
  static GraphMemory& of(int device);

  /// Makes or launches a graph: nothing is trimmed meanwhile.
  template <class F>
  auto use(const F& call) {
    const std::shared_lock lock(mutex_);
    return call();
  }
  /// Says what the blocks are like that a recording asks for: they are the graph's own, so no other GPU reads
  /// them, as those of the device's default pool may be read.
  cudaMemPool_t kind();
  /// A graph that can be launched from now on.
  void begin();
  /// One that has run for the last time is destroyed by `destroy`. The last one's end gives the pool back.
  void end(const std::function<void()>& destroy) noexcept;
  /// Gives back what no graph has, after `wait`, in which the device comes to its end.
  void trim(const std::function<void()>& wait);

 private:
  int device_ = 0;
  std::shared_mutex mutex_;
  int graphs_ = 0;  // guarded by it, held alone
  std::once_flag kind_made_;
  cudaMemPool_t kind_ = nullptr;
};

}  // namespace sherd::cuda
