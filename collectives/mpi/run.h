// Ranks that are processes, connected by MPI.
#pragma once

#include <memory>

#include "collectives/processes.h"

namespace sherd::mpi {

/// Takes part in the next run. The first one of a thread starts MPI; its end ends MPI.
std::unique_ptr<ProcessRun> begin_run(const Launch& launch);

}  // namespace sherd::mpi
