// The suite on ranks that are threads.
#include <sherd.h>

#include "tests/catch.h"
#include "tests/collectives/suite.h"
#include "tests/sanitizer.h"

using namespace sherd;

TEST_CASE("what holds for every group holds on threads, in worlds of 1 to 8") {
  for (const test::Section& section : test::sections())
    for (int world : test::sanitized ? std::vector{2, 3, 5} : std::vector{1, 2, 3, 4, 5, 8}) {
      INFO(section.name << ", world of " << world);
      CHECK_NOTHROW(run_ranks(world, [&](World& w) { section.run(w.group()); }));
    }
}
