// Attention by cuDNN's kernels, where the library is installed and has one that fits.
#pragma once

#include <memory>

#include "runtime/cuda/attention.h"
#include "runtime/device.h"

namespace sherd::cuda {

/// The plans of one rank on one GPU. A form of call is planned when it is first met, which takes
/// tens of milliseconds; calls with too little work to pay for that are left to our own kernels.
class CudnnAttention {
 public:
  explicit CudnnAttention(Device device);
  ~CudnnAttention();
  CudnnAttention(const CudnnAttention&) = delete;
  CudnnAttention& operator=(const CudnnAttention&) = delete;

  /// Whether the call has enough work to pay for a plan, for which our own kernels are not faster, and
  /// nothing that cuDNN has no kernel for, but perhaps heads that are shared.
  bool wants(const AttentionCall& call) const;
  bool wants(const AttentionGradCall& call) const;
  /// Queues what the call describes; false, and nothing is done, where cuDNN has no kernel for it that
  /// repeats to the bit.
  bool run(const AttentionCall& call);
  /// Fills `delta` too.
  bool run(const AttentionGradCall& call);

 private:
  struct Plans;
  std::unique_ptr<Plans> plans_;
};

}  // namespace sherd::cuda
