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
  struct sigaction action{};
  action.sa_handler = note_signal;
  // Reads and writes go on; a second signal finds the default.
  action.sa_flags = static_cast<int>(SA_RESTART | SA_RESETHAND);
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

bool interrupted() { return caught.load(std::memory_order_relaxed); }

}  // namespace sherd::tools
