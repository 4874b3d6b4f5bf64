// The host's side of `FaultSlot`: one board a rank and GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/cuda/faults.h"

namespace sherd::cuda {

class FaultBoard {
 public:
  FaultBoard();
  ~FaultBoard();
  FaultBoard(const FaultBoard&) = delete;
  FaultBoard& operator=(const FaultBoard&) = delete;

  FaultSlot slot() const { return slot_; }
  /// Throws ValueError for what kernels of `stream` reported; the stream has been waited for. The next report
  /// may come.
  void raise(cudaStream_t stream);

 private:
  FaultSlot slot_{};
};

}  // namespace sherd::cuda
