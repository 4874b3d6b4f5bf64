// Random faults on threads.
#include "tests/collectives/random_faults.h"

#include <sherd.h>

#include <chrono>

#include "tests/catch.h"

using namespace sherd;

namespace {

void check_seeds(std::uint64_t first, std::uint64_t count, const test::Fate& fate = {}) {
  CHECK(test::complaints_of_random_faults(first, count, fate) == std::vector<std::string>());
}

}  // namespace

TEST_CASE("a random fault in a random program: every rank hears whose it is", "[faults]") {
  check_seeds(0, 400);
}

/// A rank that computes for so long.
test::Fate slow(double seconds) {
  const auto compute = [seconds] {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (std::chrono::steady_clock::now() < end) full({1000}, 1.0);
  };
  return {.stop = compute, .seconds = seconds};
}

TEST_CASE("a random fault beside a rank that computes: every rank hears whose it is", "[faults]") {
  check_seeds(400, 40, slow(0.1));
}

TEST_CASE("a random fault beside a rank that computes for 20 s", "[.soak]") {
  check_seeds(500, 30, slow(20));
}

TEST_CASE("thousands of random faults", "[.soak]") { check_seeds(1000, 20000); }
