#include "tools/launch_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "runtime/shown.h"

namespace sherd::tools {
namespace {

std::vector<pid_t> own_children() {
  std::ifstream file(fmt::format("/proc/self/task/{}/children", ::getpid()));
  std::vector<pid_t> children;
  for (pid_t child = 0; file >> child;) children.push_back(child);
  return children;
}

bool some_are_left() {
  pid_t ended = 0;
  while ((ended = ::waitpid(-1, nullptr, WNOHANG)) > 0) {
  }
  return ended == 0;
}

}  // namespace

bool end_with_parent(int signal, pid_t parent) {
  return ::prctl(PR_SET_PDEATHSIG, signal) == 0 && ::getppid() == parent;
}

pid_t start_process(std::span<char* const> command, const Birth& birth, int& failure) {
  failure = 0;
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    failure = errno;
    return -1;
  }
  const Handle reader(ends[0]);
  Handle writer(ends[1]);
  const pid_t parent = ::getpid(), child = ::fork();
  if (child == 0) {
    if (birth.own_group) ::setpgid(0, 0);
    if (birth.at_parents_end != 0 && !end_with_parent(birth.at_parents_end, parent)) ::_exit(127);
    if (birth.before) birth.before();
    if (birth.mask != nullptr) ::sigprocmask(SIG_SETMASK, birth.mask, nullptr);
    ::execvp(command[0], command.data());
    const int error = errno;
    [[maybe_unused]] const auto told = ::write(writer.get(), &error, sizeof error);
    ::_exit(127);
  }
  if (child < 0) {
    failure = errno;
    return -1;
  }
  if (birth.own_group) ::setpgid(child, child);  // here too: whoever is first
  writer = Handle();
  ssize_t got = 0;
  do {
    got = ::read(reader.get(), &failure, sizeof failure);
  } while (got < 0 && errno == EINTR);
  if (got == 0) return child;
  ::waitpid(child, nullptr, 0);
  return -1;
}

Handle output_for_mpi(const char* file) {
  const Handle opened(::open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  // Far from the numbers that a program takes for its own files; open in the processes to come.
  Handle output(::fcntl(opened.get(), F_DUPFD, 200));
  if (!output.open()) return output;
  for (const char* variable : {"OPAL_OUTPUT_STDERR_FD", "PMIX_OUTPUT_STDERR_FD"})
    ::setenv(variable, std::to_string(output.get()).c_str(), 1);
  return output;
}

void adopt_orphans() { ::prctl(PR_SET_CHILD_SUBREAPER, 1); }

void end_children(std::chrono::milliseconds time, const std::function<bool()>& hurry) {
  using Clock = std::chrono::steady_clock;
  constexpr auto most = std::chrono::seconds(2);
  for (Clock::time_point end = Clock::now() + time; some_are_left() && Clock::now() < end + most;) {
    if (Clock::now() >= end)
      for (const pid_t process : own_children()) ::kill(process, SIGKILL);
    if (hurry()) end = std::min(end, Clock::now());
  }
}

namespace {

/// What stands behind the name in a `stat` of /proc, from the state on.
std::vector<std::string> words_of_stat(const std::filesystem::path& folder) {
  std::ifstream file(folder / "stat");
  std::string line;
  std::getline(file, line);
  const std::size_t name_end = line.rfind(')');
  std::istringstream rest(name_end == std::string::npos ? "" : line.substr(name_end + 1));
  std::vector<std::string> words;
  for (std::string word; rest >> word;) words.push_back(word);
  return words;
}

}  // namespace

Activity activity_of(pid_t process) {
  const std::filesystem::path folder = fmt::format("/proc/{}", process);
  Activity activity;
  std::error_code gone;
  for (std::filesystem::directory_iterator task(folder / "task", gone), end; !gone && task != end;
       task.increment(gone)) {
    const std::vector<std::string> state = words_of_stat(task->path());
    activity.sleeps = activity.sleeps && !state.empty() && state[0] == "S";
    std::ifstream children(task->path() / "children");
    for (pid_t child = 0; children >> child;) {
      const std::vector<std::string> its = words_of_stat(fmt::format("/proc/{}", child));
      if (!its.empty() && its[0] != "Z" && its[0] != "X") activity.children.push_back(child);
    }
  }
  const std::vector<std::string> words = words_of_stat(folder);
  constexpr std::size_t user = 11, system = 12;
  if (words.size() > system)
    activity.ticks =
        std::strtoull(words[user].c_str(), nullptr, 10) + std::strtoull(words[system].c_str(), nullptr, 10);
  return activity;
}

bool is_ending(pid_t process) {
  constexpr std::size_t flags = 6;
  constexpr unsigned long exiting = 4;  // PF_EXITING of the kernel's
  const std::vector<std::string> words = words_of_stat(fmt::format("/proc/{}", process));
  return words.size() > flags && (std::strtoul(words[flags].c_str(), nullptr, 10) & exiting) != 0;
}

bool is_pending(pid_t process, int signal) {
  std::ifstream file(fmt::format("/proc/{}/status", process));
  for (std::string word; file >> word;) {
    std::uint64_t pending = 0;
    if (word == "ShdPnd:") return (file >> std::hex >> pending) && (pending >> (signal - 1) & 1) != 0;
  }
  return false;
}

int exit_status(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }

std::string how_it_ended(int status) {
  if (WIFEXITED(status)) return fmt::format("ended with status {}", WEXITSTATUS(status));
  return fmt::format("ended by signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
}

std::string cannot_start(std::string_view program, int error) {
  return fmt::format("{} cannot be started ({})", program, std::generic_category().message(error));
}

namespace {

void say_whole(const std::string& line) {
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace

void say(std::string_view text) { say_whole(fmt::format("sherd launch: {}\n", one_line(text))); }
void say_as_program(std::string_view text) { say_whole(fmt::format("sherd: {}\n", one_line(text))); }
void say(int rank, std::string_view text) { say(fmt::format("rank {} {}", rank, text)); }

}  // namespace sherd::tools
