#include "nn/batch_sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "runtime/error.h"
#include "tests/catch.h"

using namespace sherd;
using nn::BatchSampler;

namespace {

using Samples = std::vector<std::int64_t>;

Samples joined_over_ranks(int world, std::int64_t step, std::int64_t batch, std::uint64_t seed) {
  Samples all;
  for (int rank = 0; rank < world; ++rank) {
    const Samples part = BatchSampler(1000, {batch, seed, rank, world}).at(step);
    CHECK(part.size() == static_cast<std::size_t>(batch / world));
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace

TEST_CASE("the parts of all ranks, in order, are the batch of one rank") {
  for (const int world : {1, 2, 3, 4, 6, 8}) {
    for (const std::int64_t step : {0, 1, 17, 1'000'000}) {
      INFO("world " << world << ", step " << step);
      CHECK(joined_over_ranks(world, step, 24, 7) == BatchSampler(1000, {24, 7}).at(step));
    }
  }
}

TEST_CASE("ranks draw for themselves: their parts differ") {
  const Samples a = BatchSampler(std::int64_t{1} << 40, {8, 1, 0, 2}).at(3),
                b = BatchSampler(std::int64_t{1} << 40, {8, 1, 1, 2}).at(3);
  for (const std::int64_t sample : a) CHECK(std::ranges::find(b, sample) == b.end());
}

TEST_CASE("a sampler continues from its step") {
  BatchSampler whole(99, {5, 3});
  for (int i = 0; i < 4; ++i) whole.next();
  BatchSampler resumed(99, {5, 3});
  resumed.set_step(whole.step());
  for (int i = 0; i < 3; ++i) CHECK(resumed.next() == whole.next());
  CHECK(resumed.step() == 7);
}

TEST_CASE("seeds and steps change the batch") {
  const BatchSampler sampler(1 << 30, {16, 1});
  CHECK(sampler.at(0) != sampler.at(1));
  CHECK(sampler.at(0) != BatchSampler(1 << 30, {16, 2}).at(0));
  CHECK(sampler.at(0) == BatchSampler(1 << 30, {16, 1}).at(0));
}

TEST_CASE("every item is drawn, about equally often") {
  for (const std::int64_t items : {1, 2, 7, 100}) {
    Samples count(static_cast<std::size_t>(items));
    const BatchSampler sampler(items, {1000, 5});
    for (int step = 0; step < 20; ++step)
      for (const std::int64_t sample : sampler.at(step)) ++count.at(static_cast<std::size_t>(sample));
    const double expected = 20000.0 / static_cast<double>(items);
    double deviation = 0;
    for (const std::int64_t n : count)
      deviation += (static_cast<double>(n) - expected) * (static_cast<double>(n) - expected) / expected;
    INFO(items << " items");
    CHECK(deviation < static_cast<double>(items) +
                          6 * std::sqrt(2.0 * static_cast<double>(items)));  // chi-squared, six deviations
  }
}

TEST_CASE("a sampler refuses what it cannot draw") {
  CHECK_THROWS_AS(BatchSampler(0), ValueError);
  CHECK_THROWS_AS(BatchSampler(5, {.batch = 0}), ValueError);
  CHECK_THROWS_AS(BatchSampler(5, {.batch = 6, .world = 4}), ValueError);
  CHECK_THROWS_AS(BatchSampler(5, {.batch = 4, .rank = 2, .world = 2}), ValueError);
  CHECK_THROWS_AS(BatchSampler(5, {.batch = 4, .rank = -1, .world = 2}), ValueError);
  CHECK_THROWS_AS(BatchSampler(5).at(-1), ValueError);
  CHECK_THROWS_AS(BatchSampler(5).set_step(-1), ValueError);
}

TEST_CASE("a batch of text holds windows and the bytes that follow") {
  Samples values(50);
  std::iota(values.begin(), values.end(), 200);
  const std::vector<std::uint8_t> text(values.begin(), values.end());
  for (const std::int64_t context : {1, 3, 49}) {
    const Samples starts = {0, (49 - context) / 2, 49 - context};
    const nn::Batch batch = nn::text_batch(text, starts, context);
    const Samples tokens = batch.tokens.to_vector<std::int64_t>(),
                  targets = batch.targets.to_vector<std::int64_t>();
    for (std::size_t row = 0; row < 3; ++row) {
      for (std::int64_t i = 0; i < context; ++i) {
        const std::size_t at = row * static_cast<std::size_t>(context) + static_cast<std::size_t>(i);
        CHECK(tokens[at] == text[static_cast<std::size_t>(starts[row] + i)]);
        CHECK(targets[at] == text[static_cast<std::size_t>(starts[row] + i + 1)]);
      }
    }
  }
  CHECK_THROWS_AS(nn::text_batch(text, Samples{0, 1}, 49), ValueError);
  CHECK_THROWS_AS(nn::text_batch(text, Samples{-1}, 3), ValueError);
  CHECK_THROWS_AS(nn::text_batch(text, Samples{0}, 0), ValueError);
}
