// Ranks that are processes, connected by a wire.
#pragma once

#include <memory>

#include "collectives/launch.h"

namespace sherd::processes {

/// Takes part in the next run. The first one of a thread connects to the others.
std::unique_ptr<ProcessRun> begin_run(const Launch& launch);

}  // namespace sherd::processes
