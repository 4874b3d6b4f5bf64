// Numbers in random order, as a call on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/device_key.h"
#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// The numbers below `n` in the order that the CPU gives them with this key.
struct RandomOrderCall {
  static constexpr std::int64_t most = (std::int64_t{1} << 31) - 1;
  DeviceKey key;
  std::int64_t n = 0;  ///< 1 to `most`
  std::int64_t* out = nullptr;
  cudaStream_t stream = nullptr;
  void* scratch = nullptr;  ///< `scratch_bytes()`, aligned to 256

  std::int64_t scratch_bytes() const;
};
void launch_random_order(const RandomOrderCall& call);

}  // namespace sherd::cuda
