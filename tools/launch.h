// `sherd launch`: starts a program as several processes that are each other's ranks.
//
// Four kinds of process, each of which ends the next when it dies, however it dies:
//
//   launcher    what the user started: passes signals on, removes temporary folders at the end
//   supervisor  starts mpirun, hears of every rank, decides when the job has to end
//   mpirun      connects the ranks
//   keeper      one a rank (`sherd launch-rank`): starts the program, tells how it ended
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace sherd::tools {

struct LaunchOptions {
  int ranks = 1;
  std::string hosts;                     ///< "a,b:4": machines and how many ranks each; none: this one
  std::vector<std::string> mpirun_args;  ///< for mpirun, as they are
  std::int64_t connect_within = 60;      ///< seconds, once every rank waits for it; on one machine
  std::string events;                    ///< file for a line for each thing that happens, or none
  std::vector<std::string> command;      ///< the program and its arguments
};

/// The first word of a keeper's command line.
inline constexpr const char* keeper_command = "launch-rank";

/// The command line that starts the ranks: mpirun, told that ranks may share cores and that a rank's end is
/// the others' to report, and for every rank `sherd` as its keeper, which reports to `socket`.
std::vector<std::string> launch_command(const LaunchOptions& options, bool root, const std::string& sherd,
                                        const std::string& socket);

/// Runs it and waits. Returns 0 when every rank ended with status 0. Otherwise: 128 + the signal when the
/// launcher was asked to stop, else the status of the first rank that failed, else mpirun's.
int launch(const LaunchOptions& options);

/// A keeper's life: runs `command`, which a null ends, as mpirun's rank, passes signals on to it, and reports
/// to `socket`.
/// Returns the rank's exit status as a shell would say it.
int keep_rank(const char* socket, std::span<char* const> command);

}  // namespace sherd::tools
