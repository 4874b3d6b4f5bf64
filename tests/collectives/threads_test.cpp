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
