// Waits of the host for a device.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

namespace sherd::cuda {

/// Return when the stream, or the event, is done. The rank goes on with its other work meanwhile, for which
/// peers' devices may wait. `what` begins the message of a DeviceError.
void wait_for(cudaStream_t stream, std::string_view what);
void wait_for(cudaEvent_t event, std::string_view what);

}  // namespace sherd::cuda
