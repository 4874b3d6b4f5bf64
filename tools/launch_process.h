// Processes and signals, as the launcher and the keepers of its ranks use them.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <functional>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sherd::tools {

/// Set for mpirun, taken back for the program unless the user had set it to something else.
inline constexpr const char *no_epoll_variable = "EVENT_NOEPOLL", *no_epoll_value = "sherd launch";

/// Owns a file descriptor.
class Handle {
 public:
  explicit Handle(int fd = -1) : fd_(fd) {}
  Handle(Handle&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Handle() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }
  bool open() const { return fd_ >= 0; }

 private:
  int fd_;
};

/// While it lives, these signals wait until they are asked for.
class HeldSignals {
 public:
  HeldSignals(std::initializer_list<int> signals) {
    ::sigemptyset(&held_);
    for (int signal : signals) ::sigaddset(&held_, signal);
    ::sigprocmask(SIG_BLOCK, &held_, &before_);
  }
  ~HeldSignals() { ::sigprocmask(SIG_SETMASK, &before_, nullptr); }
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;

  const sigset_t& held() const { return held_; }
  const sigset_t& before() const { return before_; }
  /// The next one; waits for it.
  int next() const {
    int signal = 0;
    ::sigwait(&held_, &signal);
    return signal;
  }
  /// The next one, or 0 when none comes in that time.
  int next(std::chrono::milliseconds time) const {
    const timespec limit{.tv_sec = time.count() / 1000, .tv_nsec = time.count() % 1000 * 1'000'000};
    return std::max(0, ::sigtimedwait(&held_, nullptr, &limit));
  }

 private:
  sigset_t held_{}, before_{};
};

/// Comes to those whose parent died. Nothing else here uses it.
inline constexpr int parent_died = SIGUSR1;

/// What a child process is given beside its command line.
struct Birth {
  int at_parents_end = 0;          ///< the signal that it gets when its parent dies
  bool own_group = false;          ///< a process group of its own, by its id
  const sigset_t* mask = nullptr;  ///< blocked signals
  std::function<void()> before{};  ///< what the child does before it becomes the program
};

/// Starts `command`, which a null ends, looked up in PATH. When that fails `failure` is errno, else 0.
pid_t start_process(std::span<char* const> command, const Birth& birth, int& failure);

/// From here on this process gets `signal` when its parent, which was `parent`, dies. False when
/// that has happened already.
bool end_with_parent(int signal, pid_t parent);

/// From here on OpenMPI, in this process and those that it starts, writes what it has to say to `file`
/// instead of to stderr, as long as the handle lives.
Handle output_for_mpi(const char* file);

/// From here on what descendants of this process leave behind becomes its child.
void adopt_orphans();
/// Ends the children of the calling process, which has one thread: by SIGKILL once `time` is over, again and
/// again, since theirs may come after them. Gives up two seconds later: nobody can end what belongs to
/// another user. `hurry` waits a little and says whether the time is over at once.
void end_children(std::chrono::milliseconds time, const std::function<bool()>& hurry);
/// What another process is at.
struct Activity {
  std::vector<pid_t> children;  ///< that live
  bool sleeps = true;           ///< all of its threads do
  std::uint64_t ticks = 0;      ///< of processor time so far
};
Activity activity_of(pid_t process);

/// Whether a process is on its way out, or over and not waited for. What it started may hear of that before
/// its parent does.
bool is_ending(pid_t process);

/// Whether the signal has come to that process, which holds it off.
bool is_pending(pid_t process, int signal);

/// Of a status from `waitpid`, as a shell would say it.
int exit_status(int status);
/// "ended with status 3", "ended by signal 9 (Killed)".
std::string how_it_ended(int status);
/// "./program cannot be started (No such file or directory)".
std::string cannot_start(std::string_view program, int error);
/// Prints "sherd launch: rank 1 ..." in one piece.
void say(int rank, std::string_view text);
void say(std::string_view text);
/// The same as "sherd: ...", as a rank itself would.
void say_as_program(std::string_view text);

}  // namespace sherd::tools
