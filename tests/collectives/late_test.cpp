// The suite on a device that works later: only what the transport orders by events is in order there.
#include <sherd.h>

#include "tests/catch.h"
#include "tests/collectives/random_faults.h"
#include "tests/collectives/suite.h"
#include "tests/late_device.h"

using namespace sherd;

TEST_CASE("what holds for every group holds for tensors of devices that work later") {
  for (const test::Section& section : test::device_sections())
    for (int world : {1, 2, 3, 4}) {
      INFO(section.name << ", world of " << world);
      CHECK_NOTHROW(run_ranks(world, [&](World& w) {
        const test::CasesOn cases(test::late_device(w.rank() % 2));
        section.run(w.group());
      }));
    }
}

TEST_CASE("a random fault in a random program on devices that work later: every rank hears whose it is") {
  CHECK(test::complaints_of_random_faults(0, 60, {.device = test::late_device()}) ==
        std::vector<std::string>());
}
