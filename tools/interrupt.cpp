#include "tools/interrupt.h"

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <initializer_list>

#include "collectives/launch_report.h"

namespace sherd::tools {
namespace {

// Whoever signals a group and its leader, or every process of a job, means it once: what comes within this
// time of the first is the same request.
constexpr std::int64_t once_ns = 1'000'000'000;

// A handler may touch what is free of locks; the signal may come on one thread and be asked for on another.
std::atomic<std::int64_t> caught_at = 0;  // 0: none came
static_assert(std::atomic<std::int64_t>::is_always_lock_free);
bool launched = false;

std::int64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec + 1;
}

extern "C" void note_signal(int signal) {
  std::int64_t first = 0;
  // A launcher ends a rank that is to end at once in a way that cannot be caught.
  if (caught_at.compare_exchange_strong(first, now_ns()) || launched || now_ns() - first < once_ns) return;
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

}  // namespace

void ignore_output_signals() {
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);
}

void catch_interrupts() {
  launched = std::getenv(launch_socket_variable) != nullptr;
  const auto ignored = [](int signal) {
    struct sigaction now{};
    return ::sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
  };
  struct sigaction action{};
  action.sa_handler = note_signal;
  action.sa_flags = static_cast<int>(SA_RESTART);  // reads and writes go on
  for (const int signal : {SIGINT, SIGTERM, SIGHUP})
    if (!ignored(signal))
      ::sigaction(signal, &action, nullptr);  // what whoever started us ignores stays ignored
}

bool interrupted() { return caught_at.load(std::memory_order_relaxed) != 0; }

}  // namespace sherd::tools
