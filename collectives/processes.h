// Ranks that are processes, started by a launcher.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "collectives/fault.h"
#include "collectives/transport.h"

namespace sherd {

enum class Launcher : std::uint8_t { mpirun, slurm, torchrun };

/// What a launcher tells its processes in environment variables. Ranks count from 0.
struct Launch {
  Launcher launcher;
  int rank = 0, size = 1, local_rank = 0, local_size = 1;
};

/// Reads the variables of mpirun (OMPI_*), torchrun (RANK, WORLD_SIZE) or Slurm (SLURM_*), the first of these
/// that are set: Slurm's are also set when one of the others runs inside its allocation. Empty when none are.
/// Throws ValueError for values that are no ranks. `variable` gives the text of a variable, null for one that
/// is not set.
std::optional<Launch> read_launch(const std::function<const char*(const char*)>& variable);

/// This process's part in one run of a body by all processes.
class ProcessRun {
 public:
  virtual ~ProcessRun();
  /// This rank's end of the group of all processes.
  virtual std::unique_ptr<Transport> world() = 0;
  /// The body has ended on this process: it returned, or threw `reason`. Returns when the peers have what
  /// they need of this rank.
  virtual void leave(Departure how, const std::string& reason) noexcept = 0;
};

/// Takes part in the next run, together with all processes of `launch`. Throws NotImplementedError when this
/// build has no way to reach them.
std::unique_ptr<ProcessRun> begin_process_run(const Launch& launch);

}  // namespace sherd
