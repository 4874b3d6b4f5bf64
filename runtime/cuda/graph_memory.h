// What kernels make on their way while a rank records: blocks that stay where they are as long as a graph of
// the rank may run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

namespace sherd::cuda {

/// A rank's blocks for recordings on one GPU, held by its graphs. These run one after another on the rank's
/// stream, so all use the same blocks. They come from the driver as any memory does, not by nodes of a graph:
/// a launch is shorter without such nodes, and the driver has one pool for those of all ranks of a GPU, whose
/// graphs were seen to read other values where the pool was mapped for a second GPU.
class GraphMemory {
 public:
  explicit GraphMemory(int device);
  /// The graphs have run for the last time.
  ~GraphMemory();
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;

  /// A block for what a lane of the recording under way makes (lanes.h); OutOfMemoryError where the driver
  /// has none. Lanes run beside each other, so none has a block that another one had.
  void* take(std::size_t bytes, int lane);
  /// A block that what is recorded from now on may use again. Ignores others.
  void give(void* block) noexcept;
  /// Of all blocks.
  std::size_t bytes() const;
  /// What `stream` does from now on may use the blocks.
  void before(cudaStream_t stream);

 private:
  struct Block {
    void* data;
    std::size_t bytes;
    int lane;
    bool taken;
  };
  int device_;
  cudaStream_t stream_ = nullptr;  // on which the driver gives and gets the blocks
  cudaMemPool_t pool_ = nullptr;   // of these alone: no order of another stream's work comes into a recording
  std::vector<Block> blocks_;
};

}  // namespace sherd::cuda
