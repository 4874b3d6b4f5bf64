// GPUs of several processes, connected by NCCL.
#pragma once

#include <memory>

#include "runtime/device_network.h"

namespace sherd::cuda {

class DeviceState;

/// As `Backend::network_offer`. NCCL is loaded here, when tensors of a GPU are to travel between processes
/// for the first time: the library of that path that SHERD_NCCL names, none where it says "off".
NetworkOffer nccl_offer(Device device, bool first);
/// Connects without waiting: ncclCommInitRankConfig.
std::unique_ptr<DeviceNetwork> nccl_connect(DeviceState& state, Device device, NetworkOffer own,
                                            const NetworkCard& first, int rank, int size);

}  // namespace sherd::cuda
