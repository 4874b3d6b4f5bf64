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
SHERD_API std::optional<Launch> read_launch(const std::function<const char*(const char*)>& variable);

/// Where the processes of a job meet that connect by themselves: at the first one.
struct MeetingPlace {
  std::string host;  ///< a name or an IPv4 address of rank 0's machine
  int port = 0;
  std::string token;  ///< who does not know it is no process of the job
};

/// Reads MASTER_ADDR, MASTER_PORT and SHERD_JOB_TOKEN. Slurm's own variables stand in for the first two, and
/// loopback for the first where all ranks are on one machine; the
/// job's name, as torchrun and Slurm tell it, for the token. The port after MASTER_PORT, if the latter is the
/// one of torchrun's store. Throws ValueError for what is missing or no port.
MeetingPlace read_meeting_place(const Launch& launch,
                                const std::function<const char*(const char*)>& variable);

enum class WireKind : std::uint8_t { mpi, tcp };

/// What SHERD_WIRE says ("mpi" or "tcp", else ValueError), or: what torchrun starts connects over TCP, as
/// does everything in a build without MPI; all else over MPI.
WireKind read_wire(const Launch& launch, const std::function<const char*(const char*)>& variable,
                   bool has_mpi);

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

}  // namespace sherd
