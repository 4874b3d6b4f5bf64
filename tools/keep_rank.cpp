// The keeper of a rank: mpirun's child, the program's parent.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <set>

#include "collectives/launch_report.h"
#include "tools/last_words.h"
#include "tools/launch.h"
#include "tools/launch_process.h"

namespace sherd::tools {
namespace {

using namespace std::chrono_literals;
using Kind = LaunchReport::Kind;

/// What a program leaves behind may still be writing its last output.
constexpr auto time_to_end = 2s;

class Keeper {
 public:
  explicit Keeper(const char* socket) : socket_(socket), mpirun_(::getppid()) {
    // Also sent when only the thread of mpirun ends that started this process: `keep` looks again.
    if (!end_with_parent(parent_died, mpirun_)) ::raise(parent_died);
    adopt_orphans();
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
    if (status != 0) end_the_rest(0s);
    // Where nobody hears it, what was not asked for is said.
    const bool asked_for = WIFSIGNALED(status) && sent_.contains(WTERMSIG(status));
    const Kind kind = asked_for && WTERMSIG(status) == SIGKILL ? Kind::followed : Kind::ended;
    if (!tell(kind, status) && status != 0 && !asked_for) say(rank_, how_it_ended(status));
    if (status == 0) end_the_rest(time_to_end);
    return exit_status(status);
  }

 private:
  bool tell(Kind kind, int value) const { return tell_launcher(socket_, {kind, rank_, value, program_}); }

  pid_t start(std::span<char* const> command, int& failure) const {
    // What MPI's library has to say about a rank's end is for MPI's authors.
    const Handle nowhere = output_for_mpi("/dev/null");
    ::setenv(launch_socket_variable, socket_, 1);
    ::setenv(launch_errors_variable, identity_of_stderr().c_str(), 1);
    if (const char* epoll = std::getenv(no_epoll_variable);
        epoll && std::string_view(epoll) == no_epoll_value)
      ::unsetenv(no_epoll_variable);
    // Before the program runs, so that the launcher can end what it starts whenever this process is killed.
    const auto tell_born = [this] { tell_launcher(socket_, {Kind::born, rank_, 0, ::getpid()}); };
    return start_process(
        command,
        {.at_parents_end = SIGKILL, .own_group = true, .mask = &signals_.before(), .before = tell_born},
        failure);
  }

  /// Until the program has ended; returns how.
  int keep() {
    for (;;) {
      int status = 0;
      for (pid_t ended = 0; (ended = ::waitpid(-1, &status, WNOHANG)) > 0;)
        if (ended == program_) return status;
      const int signal = signals_.next();
      // Of those who tell every process of the job to stop each tells this one too: the program hears it
      // once.
      if ((signal == SIGINT || signal == SIGTERM) && sent_.empty()) send(signal);
      if (ends_job(signal)) send(SIGKILL);
    }
  }
  void send(int signal) {
    sent_.insert(signal);
    ::kill(-program_, signal);
  }

  bool ends_job(int signal) const {
    return signal == SIGQUIT || (signal == parent_died && ::getppid() != mpirun_);
  }

  /// What the program started and left goes too: mpirun would wait as long as it holds the rank's output.
  void end_the_rest(std::chrono::milliseconds time) const {
    end_children(time, [this] { return ends_job(signals_.next(100ms)); });
  }

  const char* socket_;
  HeldSignals signals_{SIGINT, SIGTERM, SIGQUIT, SIGCHLD, parent_died};
  pid_t mpirun_, program_ = 0;
  int rank_ = 0;
  std::set<int> sent_;  ///< signals, to the program
};

}  // namespace

int keep_rank(const char* socket, std::span<char* const> command) { return Keeper(socket).run(command); }

}  // namespace sherd::tools
