// Asking the driver for something while a rank records.
#pragma once

#include <cuda_runtime_api.h>

namespace sherd::cuda {

/// A scope in which this thread may ask the driver for what touches no recording, though one is under way.
class BesideRecording {
 public:
  BesideRecording() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideRecording() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideRecording(const BesideRecording&) = delete;
  BesideRecording& operator=(const BesideRecording&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace sherd::cuda
