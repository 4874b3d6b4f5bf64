// Work of a rank's stream as a CUDA graph.
#pragma once

#include <memory>

#include "runtime/device.h"
#include "runtime/device_recording.h"

namespace sherd::cuda {

/// As `Backend::record`.
std::unique_ptr<DeviceRecording> record_graph(Device device, const WorkInParts& work);

}  // namespace sherd::cuda
