// The scenarios that the catalogue runs on processes; a launcher starts this program:
//   mpirun -n 2 scenarios_of_processes
// Two processes run those of a world of one too, each in a world of its own beside the other.
#include <algorithm>
#include <iostream>
#include <string_view>

#include "tests/rank_device.h"
#include "tests/scenarios/scenario.h"

using namespace sherd;
using namespace sherd::scenarios;

namespace {

struct Process {
  int rank = 0, count = 1;
};
Process this_process() {
  Process process;
  run_ranks(0, [&](World& world) { process = {world.rank(), world.size()}; });
  return process;
}

bool fits(int world, int processes) { return world == processes || (world == 1 && processes == 2); }

bool passes(const Scenario& scenario, const Place& place) {
  const std::vector<Outcome> outcomes = run(scenario, place);
  return std::ranges::all_of(outcomes, [](const Outcome& o) { return o.error.empty(); });
}

}  // namespace

int main() {
  const Process process = this_process();
  if (const std::string reason = test::why_not_here(compute_name(), process.count); !reason.empty()) {
    if (process.rank == 0)
      std::cout << "skipped: " << reason << "\nsherd-tests: 0 passed, 0 failed, 1 skipped" << std::endl;
    return 0;
  }
  int passed = 0, failed = 0;
  for (const Scenario& scenario : all_scenarios()) {
    if (scenario.harness != Harness::processes) continue;
    for (const int world : scenario.worlds)
      if (fits(world, process.count))
        ++(passes(scenario, {Harness::processes, world, process.count, process.rank == 0}) ? passed : failed);
  }
  if (process.rank == 0)
    std::cout << "sherd-tests: " << passed << " passed, " << failed << " failed, 0 skipped" << std::endl;
  return passed > 0 && failed == 0 ? 0 : 1;
}
