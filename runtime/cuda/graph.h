// Work of a rank's stream as a CUDA graph.
#pragma once

#include <functional>
#include <memory>

#include "runtime/device.h"
#include "runtime/recording.h"

namespace sherd::cuda {

/// As `Backend::record`.
std::unique_ptr<Recording> record_graph(Device device, const std::function<void()>& work);

}  // namespace sherd::cuda
