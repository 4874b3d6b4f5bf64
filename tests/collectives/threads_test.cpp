// Ranks as threads: how they start, what they inherit, how they end.
#include <sherd.h>

#include "tests/catch.h"
#include "tests/ranks.h"

using namespace sherd;
using sherd::test::expect;

TEST_CASE("every rank runs the body once, with its own rank") {
  for (int ranks : {1, 2, 3, 4, 5, 8}) {
    std::vector<int> seen(static_cast<std::size_t>(ranks));
    run_ranks(ranks, [&](World& world) {
      ++seen[static_cast<std::size_t>(world.rank())];
      Tensor x = full({3}, world.rank() + 1.0);
      world.group().all_reduce(x);
      world.group().barrier();
      expect(x.to_vector<float>()[1] == static_cast<float>(ranks * (ranks + 1) / 2), "sum {}",
             x.to_vector<float>()[1]);
    });
    CHECK(seen == std::vector<int>(static_cast<std::size_t>(ranks), 1));
  }
}

TEST_CASE("calls that are queued when a body ends are posted, or the rank hears why not") {
  for (const int calls : {1, 8, 9, 40})
    for (const std::int64_t n : {1, 100000}) {
      const auto first = [&](World& world) {
        for (int i = 0; i < calls; ++i) {
          const Tensor x = full({n}, i);
          (void)world.group().enqueue(
              {.kind = CollectiveKind::broadcast, .inputs = {x}, .outputs = {x}, .peer = 0}, WhenFull::queue);
        }
      };
      CHECK_NOTHROW(run_ranks(3, [&](World& world) {
        if (world.rank() == 0) return first(world);
        for (int i = 0; i < calls; ++i) {
          const Tensor x = zeros({n});
          world.group().broadcast(x, 0);
          expect(x.to_vector<float>().back() == static_cast<float>(i), "call {}: {}", i,
                 x.to_vector<float>().back());
        }
      }));
      if (calls > 8)
        CHECK_THROWS_AS(run_ranks(2,
                                  [&](World& world) {
                                    if (world.rank() == 0) first(world);
                                  }),
                        CollectiveError);
    }
}
