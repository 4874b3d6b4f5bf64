#include "tools/launch.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "runtime/error.h"

namespace sherd::tools {
namespace {

// When survivors may live, mpirun forgets how ranks ended, so every rank says it itself. Its shell outlives a
// polite kill, which reaches the rank too: it may have something to save.
constexpr const char* tell_status =
    R"(trap : TERM; "$@"; status=$?; [ $status = 0 ] && exit; )"
    R"(echo "sherd launch: rank ${OMPI_COMM_WORLD_RANK:-?} ended with status $status" >&2; )"
    R"([ -w "$0" ] && echo $status >>"$0"; exit $status)";

/// A file that goes with its owner.
class StatusFile {
 public:
  StatusFile() : path_((std::filesystem::temp_directory_path() / "sherd-launch-XXXXXX").string()) {
    const int fd = ::mkstemp(path_.data());
    const int error = errno;
    check<FileError>(fd >= 0, "launch: {} cannot be made ({})", path_,
                     std::generic_category().message(error));
    ::close(fd);
  }
  ~StatusFile() { ::unlink(path_.c_str()); }
  StatusFile(const StatusFile&) = delete;
  StatusFile& operator=(const StatusFile&) = delete;

  const std::string& path() const { return path_; }
  /// Of the rank that failed first; 0 when none did.
  int first() const {
    int status = 0;
    std::ifstream(path_) >> status;
    return status;
  }

 private:
  std::string path_;
};

/// While it lives, signals that end the program wait for `next`.
class HeldSignals {
 public:
  HeldSignals() {
    ::sigemptyset(&held_);
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) ::sigaddset(&held_, signal);
    ::sigprocmask(SIG_BLOCK, &held_, &before_);
  }
  ~HeldSignals() { ::sigprocmask(SIG_SETMASK, &before_, nullptr); }
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;

  const sigset_t& before() const { return before_; }
  int next() const {
    int signal = 0;
    ::sigwait(&held_, &signal);
    return signal;
  }

 private:
  sigset_t held_{}, before_{};
};

pid_t spawn(std::vector<std::string> command, const sigset_t& mask) {
  std::vector<char*> arguments;
  for (std::string& word : command) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  ::posix_spawnattr_setsigmask(&attributes, &mask);
  pid_t process = 0;
  const int error = ::posix_spawnp(&process, arguments[0], nullptr, &attributes, arguments.data(), environ);
  ::posix_spawnattr_destroy(&attributes);
  check<StateError>(
      error == 0,
      "launch: {} cannot be started ({}); install OpenMPI (on Debian and Ubuntu openmpi-bin), or run the "
      "program alone: its ranks are threads then",
      command[0], std::generic_category().message(error));
  return process;
}

/// Its exit status, as a shell would say it. Passes on what asks it to end; Ctrl-C reaches it by itself.
int wait_for(pid_t process, const HeldSignals& signals) {
  for (int status = 0;;) {
    if (::waitpid(process, &status, WNOHANG) == process)
      return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    const int signal = signals.next();
    if (signal == SIGTERM || signal == SIGHUP) ::kill(process, signal);
  }
}

}  // namespace

std::vector<std::string> launch_command(const LaunchOptions& o, bool root, const std::string& status_file) {
  check<ValueError>(!o.command.empty(), "launch: no program was named; sherd launch -n {} PROGRAM [ARGS...]",
                    o.ranks);
  check<ValueError>(o.ranks >= 1, "launch: -n is {}; at least 1 rank is needed", o.ranks);
  std::vector<std::string> command = {"mpirun",    "-n",   std::to_string(o.ranks), "--enable-recovery",
                                      "--bind-to", "none", "--oversubscribe"};
  if (root) command.emplace_back("--allow-run-as-root");
  if (!o.hosts.empty()) command.insert(command.end(), {"--host", o.hosts});
  command.insert(command.end(), o.mpirun_args.begin(), o.mpirun_args.end());
  command.insert(command.end(), {"sh", "-c", tell_status, status_file});
  command.insert(command.end(), o.command.begin(), o.command.end());
  return command;
}

int launch(const LaunchOptions& options) {
  const StatusFile statuses;
  const HeldSignals signals;
  const pid_t process = spawn(launch_command(options, ::geteuid() == 0, statuses.path()), signals.before());
  const int own = wait_for(process, signals);
  const int first = statuses.first();
  return first != 0 ? first : own;
}

}  // namespace sherd::tools
