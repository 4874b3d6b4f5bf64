// The wire over MPI.
#pragma once

#include "collectives/processes/wire.h"

namespace sherd::mpi {

/// Starts MPI unless the program has; its `end` ends it then.
std::unique_ptr<processes::Wire> connect(const Launch& launch);

}  // namespace sherd::mpi
