// The keeper of a rank: mpirun's child, the program's parent.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "collectives/launch_report.h"
#include "tools/launch.h"
#include "tools/launch_process.h"

namespace sherd::tools {
namespace {

using Kind = LaunchReport::Kind;

class Keeper {
 public:
  explicit Keeper(const char* socket) : socket_(socket), mpirun_(::getppid()) {
    // Also sent when only the thread of mpirun ends that started this process: `keep` looks again.
    if (!end_with_parent(parent_died, mpirun_)) ::raise(parent_died);
    if (const char* rank = std::getenv("OMPI_COMM_WORLD_RANK")) rank_ = std::atoi(rank);
  }

  int run(std::span<char* const> command) {
    int failure = 0;
    tell(Kind::started, ::getpid());  // already here, so that this process's own end is noticed
    program_ = start(command, failure);
    if (failure != 0) {
      if (!tell(Kind::unstartable, failure)) say(rank_, cannot_start(command[0], failure));
      return 127;
    }
    tell(Kind::started, ::getpid());  // and now with the program
    const int status = keep();
    if (status != 0) ::kill(-program_, SIGKILL);  // what the program started would go on alone
    if (!tell(Kind::ended, status) && status != 0) say(rank_, how_it_ended(status));
    return exit_status(status);
  }

 private:
  bool tell(Kind kind, int value) const { return tell_launcher(socket_, {kind, rank_, value, program_}); }

  pid_t start(std::span<char* const> command, int& failure) const {
    // What MPI's library has to say about a rank's end is for MPI's authors.
    const Handle nowhere = output_for_mpi("/dev/null");
    ::setenv(launch_socket_variable, socket_, 1);
    return start_process(command, {.at_parents_end = SIGKILL, .own_group = true, .mask = &signals_.before()},
                         failure);
  }

  /// Until the program has ended; returns how.
  int keep() const {
    for (;;) {
      int status = 0;
      if (::waitpid(program_, &status, WNOHANG) == program_) return status;
      switch (const int signal = signals_.next()) {
        case SIGINT:
        case SIGTERM:
          ::kill(-program_, signal);
          break;
        case parent_died:
          if (::getppid() == mpirun_) break;
          [[fallthrough]];
        case SIGQUIT:
          ::kill(-program_, SIGKILL);
          break;
        default:
          break;
      }
    }
  }

  const char* socket_;
  HeldSignals signals_{SIGINT, SIGTERM, SIGQUIT, SIGCHLD, parent_died};
  pid_t mpirun_, program_ = 0;
  int rank_ = 0;
};

}  // namespace

int keep_rank(const char* socket, std::span<char* const> command) { return Keeper(socket).run(command); }

}  // namespace sherd::tools
