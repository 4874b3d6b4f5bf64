// `sherd launch`: starts a program as several processes that are each other's ranks.
#pragma once

#include <string>
#include <vector>

namespace sherd::tools {

struct LaunchOptions {
  int ranks = 1;
  std::string hosts;                     ///< "a,b:4": machines and how many ranks each; none: this one
  std::vector<std::string> mpirun_args;  ///< for mpirun, as they are
  std::vector<std::string> command;      ///< the program and its arguments
};

/// The command line that starts them: mpirun, told that ranks may share cores and that a rank's end is the
/// others' to report. Every rank that fails adds its exit status to `status_file`.
std::vector<std::string> launch_command(const LaunchOptions& options, bool root,
                                        const std::string& status_file);

/// Runs it and waits. Returns the exit status: of the first rank that failed, or mpirun's own.
int launch(const LaunchOptions& options);

}  // namespace sherd::tools
