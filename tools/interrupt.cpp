#include "tools/interrupt.h"

#include <atomic>
#include <csignal>

namespace sherd::tools {
namespace {

// A handler may touch what is free of locks; the signal may come on one thread and be asked for on another.
std::atomic<bool> caught = false;
static_assert(std::atomic<bool>::is_always_lock_free);

extern "C" void note_signal(int) { caught.store(true, std::memory_order_relaxed); }

}  // namespace

void catch_interrupts() {
  const auto ignored = [](int signal) {
    struct sigaction now {};
    return ::sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
  };
  struct sigaction action {};
  action.sa_handler = note_signal;
  // Reads and writes go on; a second signal finds the default.
  action.sa_flags = static_cast<int>(SA_RESTART | SA_RESETHAND);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP})
    if (!ignored(signal))
      ::sigaction(signal, &action, nullptr);  // what whoever started us ignores stays ignored
  // A reader of the output that goes away ends no training.
  ::signal(SIGPIPE, SIG_IGN);
}

bool interrupted() { return caught.load(std::memory_order_relaxed); }

}  // namespace sherd::tools
