// The program `sherd` as a process.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "runtime/io/file_system.h"
#include "tests/catch.h"
#include "tests/temp_directory.h"
#include "tests/tools/programs.h"

namespace sherd::test {

using Arguments = std::vector<std::string>;

/// Where a program's output goes; null for the pipe or the file that a test reads.
struct Streams {
  const char* out = nullptr;
  const char* err = nullptr;
};

/// `sherd ARGUMENTS...` in `folder`, or what stands before it with `before`. What it prints comes through a
/// pipe, so that a test can act at a line; errors go to a file.
class Command {
 public:
  Command(const TempDirectory& folder, const Arguments& arguments, Streams streams = {},
          Arguments before = {})
      : err_(folder / "err") {
    std::vector<std::string> words = std::move(before);
    words.emplace_back(built::program);
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    int ends[2];
    REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
    process_ = ::fork();
    REQUIRE(process_ >= 0);
    if (process_ == 0) {
      // Who runs the tests in the background, or under nohup, may ignore some.
      for (const int number : {SIGHUP, SIGINT, SIGQUIT, SIGTERM}) ::signal(number, SIG_DFL);
      const int out = streams.out ? ::open(streams.out, O_WRONLY) : ends[1];
      const int err = streams.err ? ::open(streams.err, O_WRONLY)
                                  : ::open(err_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
      if (::dup2(out, 1) == 1 && ::dup2(err, 2) == 2 && ::chdir(folder.path().c_str()) == 0)
        ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    ::close(ends[1]);
    pipe_ = ends[0];
  }
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;
  ~Command() {
    if (process_ != 0) {
      ::kill(process_, SIGKILL);
      wait();
    }
    ::close(pipe_);
  }

  /// Returns when it has printed `text`; false if it ends without.
  bool prints(const std::string& text) {
    while (out_.find(text) == std::string::npos)
      if (!read_more()) return false;
    return true;
  }
  pid_t process() const { return process_; }
  void signal(int number) const { ::kill(process_, number); }
  /// The exit code; 128 + the signal that ended it.
  int wait() {
    while (read_more()) {
    }
    int status = 0;
    ::waitpid(std::exchange(process_, 0), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  const std::string& out() const { return out_; }
  std::string err() const { return posix_file_system().read(err_); }

 private:
  bool read_more() {
    char bytes[4096];
    const ssize_t count = ::read(pipe_, bytes, sizeof bytes);
    if (count > 0) out_.append(bytes, static_cast<std::size_t>(count));
    return count > 0;
  }

  std::filesystem::path err_;
  std::string out_;
  pid_t process_ = 0;
  int pipe_ = -1;
};

/// Becomes readable when the process ends; its number is taken as long as this lives.
class Witness {
 public:
  explicit Witness(pid_t process) : fd_(static_cast<int>(::syscall(SYS_pidfd_open, process, 0))) {}
  Witness(Witness&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~Witness() {
    if (fd_ >= 0) ::close(fd_);
  }
  /// That it has ended, in ten seconds at most.
  bool ends(int milliseconds = 10000) const {
    pollfd process{fd_, POLLIN, 0};
    return fd_ < 0 || ::poll(&process, 1, milliseconds) == 1;
  }

 private:
  int fd_;
};

/// Signals until it ends.
inline void insist(const Command& command, int signal) {
  const Witness witness(command.process());
  while (!witness.ends(100)) command.signal(signal);
}

/// The process, its children, their children and so on.
inline std::vector<pid_t> family(pid_t process) {
  std::vector<pid_t> all = {process};
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::error_code gone;
    for (const auto& task :
         std::filesystem::directory_iterator("/proc/" + std::to_string(all[i]) + "/task", gone)) {
      std::ifstream children(task.path() / "children");
      for (pid_t child = 0; children >> child;) all.push_back(child);
    }
  }
  return all;
}
/// Waits until there are that many.
inline std::vector<pid_t> family_of(pid_t process, std::size_t members) {
  std::vector<pid_t> all;
  const auto begin = std::chrono::steady_clock::now();
  do {
    all = family(process);
  } while (all.size() < members && std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));
  return all;
}

inline Arguments with(Arguments all, const Arguments& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace sherd::test
