// Where a kernel draws its random numbers from. Safe to include in device code.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/generator.h"

namespace sherd::cuda {

/// A key of the host, or an offset from the key at `start`, which a recording reads when it runs.
struct DeviceKey {
  RandomKey key{};
  const RandomKey* start = nullptr;  ///< device memory

#ifdef __CUDACC__
  __device__ RandomKey read() const {
    return start != nullptr ? RandomKey{start->seed, start->offset + key.offset} : key;
  }
#endif
};

/// What an op that holds `key` draws with now, on this rank.
DeviceKey device_key(RandomKey key);

/// Writes `value` to the device memory at `to`, in stream order.
void launch_set_key(RandomKey value, RandomKey* to, cudaStream_t stream);

}  // namespace sherd::cuda
