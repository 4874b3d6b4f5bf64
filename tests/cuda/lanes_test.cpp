// Which parts of a recording run beside each other. No GPU is needed.
#include "runtime/cuda/lanes.h"

#include <algorithm>
#include <random>
#include <set>

#include "tests/catch.h"

namespace {

using sherd::WorkInParts;
using sherd::cuda::InLane;
using sherd::cuda::place_in_lanes;

constexpr std::size_t small = 4096, large = std::size_t{64} << 20;

/// By part: all that are done when it begins.
std::vector<std::set<std::uint32_t>> done_before(const std::vector<InLane>& placed) {
  std::vector<std::set<std::uint32_t>> done(placed.size());
  for (std::uint32_t i = 0; i < placed.size(); ++i) {
    std::vector<std::uint32_t> before = placed[i].behind;
    for (std::uint32_t k = i; k-- > 0;)
      if (placed[k].lane == placed[i].lane) {
        before.push_back(k);
        break;
      }
    for (const std::uint32_t k : before) {
      done[i].insert(k);
      done[i].insert(done[k].begin(), done[k].end());
    }
  }
  return done;
}

WorkInParts random_work(std::mt19937_64& rng, std::uint32_t count) {
  const auto upto = [&](std::uint32_t most) {
    return std::uniform_int_distribution<std::uint32_t>(0, most)(rng);
  };
  WorkInParts work;
  for (std::uint32_t i = 0; i < count; ++i) {
    std::set<std::uint32_t> after;
    for (std::uint32_t k = i == 0 ? 0 : upto(3); k-- > 0;) after.insert(i - 1 - upto(std::min(i - 1, 12U)));
    work.parts.push_back({upto(4) == 0 ? large : small, {after.begin(), after.end()}});
  }
  return work;
}

}  // namespace

TEST_CASE("lanes: every part begins when those that it must follow are done") {
  std::mt19937_64 rng(51);
  for (int program = 0; program < 300; ++program) {
    const WorkInParts work = random_work(rng, 60);
    for (const int lanes : {1, 2, 3, 4}) {
      const std::vector<InLane> placed = place_in_lanes(work, lanes);
      const auto done = done_before(placed);
      REQUIRE(placed.size() == work.parts.size());
      for (std::uint32_t i = 0; i < placed.size(); ++i) {
        CHECK((placed[i].lane >= 0 && placed[i].lane < lanes));
        for (const std::uint32_t before : work.parts[i].after) CHECK(done[i].contains(before));
        for (const std::uint32_t before : placed[i].behind) {
          CHECK(before < i);
          CHECK(placed[before].lane != placed[i].lane);
        }
      }
    }
  }
}

TEST_CASE("lanes: parts that fill the device stay in one lane") {
  std::mt19937_64 rng(52);
  for (int program = 0; program < 100; ++program) {
    const WorkInParts work = random_work(rng, 60);
    const std::vector<InLane> placed = place_in_lanes(work, 4);
    for (std::size_t i = 0; i < placed.size(); ++i)
      if (work.parts[i].bytes == large) CHECK(placed[i].lane == 0);
  }
}

TEST_CASE("lanes: a chain stays in its lane, and what branches off it goes beside it") {
  WorkInParts work;  // a chain, of whose links each has two others behind it, and one that ends them all
  constexpr std::uint32_t links = 20;
  for (std::uint32_t link = 0; link < links; ++link) {
    const auto before = [&](std::uint32_t which) {
      return link == 0 ? std::vector<std::uint32_t>{} : std::vector{3 * (link - 1) + which};
    };
    // Listed before the link, as a backward lists the gradients of weights.
    work.parts.push_back({small, before(2)});
    work.parts.push_back({small, before(2)});
    work.parts.push_back({small, before(2)});
  }
  std::vector<std::uint32_t> all;
  for (std::uint32_t i = 0; i < work.parts.size(); ++i) all.push_back(i);
  work.parts.push_back({small, all});
  const std::vector<InLane> placed = place_in_lanes(work, 4);
  for (std::uint32_t link = 1; link + 1 < links; ++link) {  // behind the last one nothing goes on
    CHECK(placed[3 * link + 2].lane == placed[2].lane);
    CHECK(placed[3 * link + 2].behind.empty());
    CHECK(placed[3 * link].lane != placed[2].lane);
    CHECK(placed[3 * link + 1].lane != placed[2].lane);
  }
  CHECK(placed.back().behind.size() <= 3);
}

TEST_CASE("lanes: with one of them nothing waits for anything else") {
  std::mt19937_64 rng(53);
  const std::vector<InLane> placed = place_in_lanes(random_work(rng, 60), 1);
  CHECK(std::ranges::all_of(placed, [](const InLane& its) { return its.lane == 0 && its.behind.empty(); }));
}
