// The host's side of `FaultSlot` (faults.h): one board for each rank and GPU.
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
  /// ValueError for the bad value that kernels of `stream` reported, if any, and clears the report;
  /// DeviceError where they gave up a call. The caller has waited for the stream.
  void raise(cudaStream_t stream);

 private:
  FaultSlot slot_{};
};

}  // namespace sherd::cuda
