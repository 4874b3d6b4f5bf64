// GPUs of several processes, connected by NCCL.
#pragma once

#include <memory>

#include "runtime/device_network.h"

namespace sherd::cuda {

class DeviceState;

/// What `Backend::network_card` says of a GPU. NCCL is loaded here, for the first time that tensors of a GPU
/// are to travel between processes: libnccl.so.2, or what SHERD_NCCL names; "off" leaves it to the host's
/// memory.
NetworkCard nccl_card(Device device, bool first);
/// Connects without waiting: ncclCommInitRankConfig.
std::unique_ptr<DeviceNetwork> nccl_connect(DeviceState& state, Device device, const NetworkCard& first,
                                            int rank, int size);

}  // namespace sherd::cuda
