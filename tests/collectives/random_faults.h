// Random programs in which one rank does one thing wrong: whoever waits hears of it, and of whom. Uses the
// library's public face only, so threads and processes run the same.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "collectives/world.h"

namespace sherd::test {

/// What the rank at fault throws where the fault is that it throws.
struct Boom : std::runtime_error {
  Boom() : std::runtime_error("boom") {}
};

/// What may befall a rank from outside.
struct Fate {
  std::function<void()> die{};   ///< of the rank at fault, in place of what it would do wrong
  std::function<void()> stop{};  ///< of another one at some moment, for `seconds`; no fault
  double seconds = 0;
  std::string device = "cpu";  ///< where the tensors lie, as of `rank_device`
};

/// How many ranks the program of a seed has, from 2 to 8.
int random_fault_ranks(std::uint64_t seed);
/// This rank's part in the program of a seed; all ranks of the world call it. `complaint` gets what this rank
/// should have heard and did not. Throws Boom or a CollectiveError where that is the rank's part.
void random_fault(World& world, std::uint64_t seed, std::string& complaint, const Fate& fate = {});
/// Runs the programs of `count` seeds from `first` on, on threads: what ranks should have heard and did not.
std::vector<std::string> complaints_of_random_faults(std::uint64_t first, std::uint64_t count,
                                                     const Fate& fate = {});

}  // namespace sherd::test
