#include <cstdlib>
#include <thread>

#include "collectives/processes/wire.h"
#include "collectives/tcp/wire.h"
#ifdef SHERD_MPI
#include "collectives/mpi/wire.h"
#endif

namespace sherd::processes {

Wire::~Wire() = default;

int spins_for(const Launch& launch) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return launch.local_size <= cores ? 2000 : 20;
}

std::unique_ptr<Wire> connect_wire(const Launch& launch) {
  const auto variable = [](const char* name) { return std::getenv(name); };
#ifdef SHERD_MPI
  if (read_wire(launch, variable, true) == WireKind::mpi) return mpi::connect(launch);
#else
  if (read_wire(launch, variable, false) == WireKind::mpi)
    fail<NotImplementedError>(
        "launch: {} processes shall be connected by MPI, which this build has not; build with -Dmpi=enabled, "
        "or "
        "set SHERD_WIRE=tcp",
        launch.size);
#endif
  return tcp::connect(launch, read_meeting_place(launch, variable));
}

}  // namespace sherd::processes
