#include "tools/interrupt.h"

#include <csignal>

namespace sherd::tools {
namespace {

volatile std::sig_atomic_t caught = 0;  // a handler can reach nothing else

extern "C" void note_signal(int) { caught = 1; }

}  // namespace

void catch_interrupts() {
  struct sigaction action{};
  action.sa_handler = note_signal;
  // Reads and writes go on; a second signal finds the default.
  action.sa_flags = static_cast<int>(SA_RESTART | SA_RESETHAND);
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

bool interrupted() { return caught != 0; }

}  // namespace sherd::tools
