// Random faults on threads.
#include "tests/collectives/random_faults.h"

#include "tests/catch.h"

using namespace sherd;

namespace {

void check_seeds(std::uint64_t first, std::uint64_t count) {
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    std::vector<std::string> complaints(static_cast<std::size_t>(test::random_fault_ranks(seed)));
    try {
      run_ranks(static_cast<int>(complaints.size()), [&](World& world) {
        test::random_fault(world, seed, complaints[static_cast<std::size_t>(world.rank())]);
      });
    } catch (const CollectiveError&) {
    } catch (const test::Boom&) {
    }
    for (const std::string& complaint : complaints) CHECK(complaint == "");
  }
}

}  // namespace

TEST_CASE("a random fault in a random program: every rank hears whose it is", "[faults]") {
  check_seeds(0, 400);
}

TEST_CASE("thousands of random faults", "[.soak]") { check_seeds(1000, 20000); }
