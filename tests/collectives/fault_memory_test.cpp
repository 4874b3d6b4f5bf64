// What faults leave behind on threads.
#include "tests/collectives/fault_memory.h"

#include <sherd.h>

#include "tests/catch.h"
#include "tests/sanitizer.h"

using namespace sherd;

namespace {

void check(int ranks, int faults, std::int64_t elements) {
  CHECK_NOTHROW(run_ranks(ranks, [=](World& world) { test::faults_leave_nothing(world, faults, elements); }));
}

}  // namespace

TEST_CASE("faults and renewals leave nothing on threads, whatever their number", "[faults]") {
  for (const int ranks : test::sanitized ? std::vector{2} : std::vector{2, 3}) {
    check(ranks, 300, 1 << 18);
    check(ranks, 1000, 1 << 12);
  }
}

TEST_CASE("ten thousand faults of large calls leave nothing on threads", "[.soak]") {
  check(2, 10000, 1 << 18);
}
