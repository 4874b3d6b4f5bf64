// GPUs of several processes, connected by NCCL.
#pragma once

#include <memory>

#include "runtime/device_network.h"

namespace sherd::cuda {

class DeviceState;

/// What `Backend::network_card` says of a GPU. NCCL is loaded here, when tensors of a GPU are to travel
/// between processes for the first time, if SHERD_NCCL asks for it: "on", or the library's path.
NetworkCard nccl_card(Device device, bool first);
/// Connects without waiting: ncclCommInitRankConfig.
std::unique_ptr<DeviceNetwork> nccl_connect(DeviceState& state, Device device, const NetworkCard& first,
                                            int rank, int size);

}  // namespace sherd::cuda
