// Ranks as threads of a process that is killed while they save.
#include "tests/tools/kills.h"

using namespace sherd;
using namespace sherd::test;

namespace {

void check_threads(int rounds) {
  check_kills(
      rounds, [](const Arguments& train) { return train; },
      [](const Command& command, std::mt19937&) { command.signal(SIGKILL); });
}

}  // namespace

TEST_CASE("killed while its threads save, a run goes on from the last good checkpoint to the same bits",
          "[threads meet]") {
  check_threads(8);
}

TEST_CASE("threads are killed 200 times while they save", "[.soak]") { check_threads(200); }
