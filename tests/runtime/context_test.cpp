// What belongs to a thread: its random stream, and what is left when it has ended.
#include "runtime/context.h"

#include <set>
#include <thread>

#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// What a new thread does first.
template <class F>
auto on_thread(const F& body) {
  decltype(body()) result;
  std::thread([&] { result = body(); }).join();
  return result;
}

std::vector<double> draws() { return doubles(rand({8})); }

/// The main thread's stream and two threads' after it.
std::vector<std::vector<double>> drawn_after(std::uint64_t seed) {
  manual_seed(seed);
  std::vector<std::vector<double>> all{on_thread(draws), draws()};
  all.push_back(on_thread(draws));
  return all;
}

}  // namespace

TEST_CASE("random: every thread draws numbers of its own, which follow from the main thread's seed") {
  std::set<std::vector<double>> seen;
  for (std::uint64_t seed : {0, 1, 2, 3}) {
    const auto first = drawn_after(seed);
    CHECK(drawn_after(seed) == first);
    seen.insert(first.begin(), first.end());
  }
  CHECK(seen.size() == 12);
}

TEST_CASE("random: a seed that a thread gives itself is its own affair") {
  manual_seed(5);
  const std::vector<double> own = draws();
  manual_seed(9);
  const std::vector<double> second = on_thread(draws);
  manual_seed(9);
  CHECK(on_thread([] {
          manual_seed(5);
          return draws();
        }) == own);
  CHECK(on_thread(draws) == second);  // neither the seed nor the order of others changed
}

TEST_CASE("random: no two streams of small seeds are one") {
  std::set<std::uint64_t> seeds;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    CHECK(derived_seed(seed, 0) == seed);
    for (std::uint64_t stream = 0; stream < 100; ++stream) seeds.insert(derived_seed(seed, stream));
  }
  CHECK(seeds.size() == 100 * 100);
}

TEST_CASE("random: a reservation of any size moves on by what it takes") {
  Generator generator(1);
  for (std::int64_t elements :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{4}, std::int64_t{5}, INT64_MAX}) {
    const std::uint64_t before = generator.state().offset;
    CHECK(generator.reserve(elements).offset == before);
    CHECK(generator.state().offset - before ==
          static_cast<std::uint64_t>(elements) / 4 + (elements % 4 != 0));
  }
}
