// Starts a program as several processes that connect over TCP, as torchrun would, and waits for all of them:
//
//   start_processes -n N PROGRAM [ARGUMENT...]
//
// Ends with 128 + the signal of a process that was killed, else the highest status.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tests/free_port.h"

namespace {

void set(const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); }

}  // namespace

int main(int argc, char** argv) {
  const int size = argc > 3 && std::strcmp(argv[1], "-n") == 0 ? std::atoi(argv[2]) : 0;
  if (size < 1) {
    std::puts("usage: start_processes -n N PROGRAM [ARGUMENT...]");
    return 2;
  }
  std::random_device random;
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", std::to_string(sherd::test::free_port()));
  set("SHERD_JOB_TOKEN", std::to_string(random()) + std::to_string(random()));
  set("WORLD_SIZE", std::to_string(size));
  set("LOCAL_WORLD_SIZE", std::to_string(size));
  std::vector<pid_t> started;
  for (int rank = 0; rank < size; ++rank) {
    set("RANK", std::to_string(rank));
    set("LOCAL_RANK", std::to_string(rank));
    const pid_t child = ::fork();
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // when this program is killed, as tests do with what hangs
      ::execvp(argv[3], argv + 3);
      std::perror(argv[3]);
      ::_exit(127);
    }
    started.push_back(child);
  }
  int worst = 0;
  for (const pid_t child : started) {
    int status = 0;
    if (::waitpid(child, &status, 0) != child) return 1;
    worst = std::max(worst, WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return worst;
}
