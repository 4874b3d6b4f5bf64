// Tiles: all of [0, n) once, whoever runs them, and what a body throws.
#include "runtime/parallel.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <set>
#include <stdexcept>

#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

TEST_CASE("parallel: tiles cover the range once, for any number of threads") {
  for (int threads : {1, 2, 5}) {
    const Threads scope(threads);
    for (std::int64_t n : {0, 1, 7, 64, 1000})
      for (std::int64_t grain : {1, 3, 64, 5000}) {
        std::vector<std::atomic<int>> seen(static_cast<std::size_t>(n));
        std::atomic<int> cut_elsewhere{0};
        parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
          if (begin % grain != 0 || end != std::min(begin + grain, n)) ++cut_elsewhere;
          for (std::int64_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
        });
        CHECK(std::all_of(seen.begin(), seen.end(), [](const auto& count) { return count == 1; }));
        CHECK(cut_elsewhere == 0);  // threads claim several at once, but each is a call of its own
      }
  }
}

TEST_CASE("parallel: ranges at the end of what can be counted") {
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  for (int threads : {1, 3}) {
    const Threads scope(threads);
    for (std::int64_t grain : {most / 2, most / 2 + 1, most - 1}) {
      std::atomic<std::int64_t> covered{0}, last{0};
      parallel_for(most, grain, [&](std::int64_t begin, std::int64_t end) {
        covered += end - begin;
        if (end == most) last = begin;
      });
      CHECK(covered == most);
      CHECK(last > 0);
    }
  }
}

TEST_CASE("parallel: what a tile throws reaches the caller, and then no tile runs") {
  struct Trouble : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  for (int threads : {1, 2, 4}) {
    const Threads scope(threads);
    for (std::int64_t bad = 0; bad < 40; bad += 3) {
      std::atomic<int> inside{0};
      const auto body = [&](std::int64_t begin, std::int64_t) {
        ++inside;
        if (begin == bad || begin == 39) {
          --inside;
          throw Trouble("tile");
        }
        --inside;
      };
      CHECK_THROWS_AS(parallel_for(40, 1, body), Trouble);
      CHECK(inside == 0);
      std::atomic<std::int64_t> sum{0};  // and the next one is whole
      parallel_for(100, 1, [&](std::int64_t begin, std::int64_t) { sum += begin; });
      CHECK(sum == 4950);
    }
    CHECK_THROWS_AS(parallel_for(8, 1, [](std::int64_t, std::int64_t) { throw 7; }), int);
    CHECK_THROWS_AS(parallel_for(8, 1,
                                 [](std::int64_t, std::int64_t) {
                                   parallel_for(8, 1, [](std::int64_t, std::int64_t) { throw 'x'; });
                                 }),
                    char);
  }
}
