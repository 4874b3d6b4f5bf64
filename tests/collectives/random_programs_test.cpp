// Random programs on threads, beyond the few seeds of the suite.
#include <sherd.h>

#include "tests/catch.h"
#include "tests/collectives/suite.h"
#include "tests/sanitizer.h"

using namespace sherd;

namespace {

void run_seeds(std::uint64_t from, std::uint64_t to) {
  for (std::uint64_t seed = from; seed < to; ++seed) {
    const int world = 2 + static_cast<int>(seed % 7);
    INFO("seed " << seed << ", world of " << world);
    CHECK_NOTHROW(run_ranks(world, [&](World& w) { test::random_program(w.group(), seed); }));
  }
}

}  // namespace

// Worlds of 2 to 8, three of each; a sanitizer has time for one.
constexpr std::uint64_t last_seed = test::sanitized ? 107 : 121;
TEST_CASE("random programs give what a serial run gives") { run_seeds(100, last_seed); }

TEST_CASE("random programs of many seeds", "[.soak]") { run_seeds(1000, 1700); }
