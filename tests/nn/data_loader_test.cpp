#include "nn/data_loader.h"

#include <atomic>
#include <csignal>
#include <set>
#include <thread>

#include "collectives/world.h"
#include "runtime/context.h"
#include "runtime/error.h"
#include "runtime/ops.h"
#include "tests/catch.h"
#include "tests/ranks.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;
using nn::DataLoader;

namespace {

using Samples = std::vector<std::int64_t>;
using Seen = std::span<const std::int64_t>;

/// A batch with what augmentation would draw for it.
struct Drawn {
  Samples samples;
  Tensor noise;
};
Drawn drawn(Seen samples) {
  const auto rows = static_cast<std::int64_t>(samples.size());
  return {{samples.begin(), samples.end()}, add(rand({rows, 2}), rand({rows, 2}))};
}
bool operator==(const Drawn& a, const Drawn& b) {
  return a.samples == b.samples && a.noise.to_vector<float>() == b.noise.to_vector<float>();
}

nn::EpochSampler epochs(int rank = 0, int world = 1) {
  return nn::EpochSampler(23,
                          {.batch = 4, .seed = 7, .last = nn::LastBatch::keep, .rank = rank, .world = world});
}

/// Two epochs and a step, made by the caller.
std::vector<Drawn> expected(int steps = 13) {
  DataLoader loader(epochs(), drawn);
  std::vector<Drawn> batches;
  for (int i = 0; i < steps; ++i) batches.push_back(loader.next());
  return batches;
}

const nn::DataLoaderOptions ways[] = {{0}, {1, 1}, {1, 5}, {3, 1}, {4, 3}};

/// `body(options)` for every number of workers.
void on_all_ways(const std::function<void(nn::DataLoaderOptions)>& body) {
  for (const nn::DataLoaderOptions& options : ways) {
    INFO(options.workers << " workers, " << options.ahead << " ahead");
    body(options);
  }
}

}  // namespace

TEST_CASE("batches come in order and are the same, drawn numbers too, whoever makes them") {
  const std::vector<Drawn> batches = expected();
  std::set<std::vector<float>> noises;
  for (std::size_t step = 0; step < batches.size(); ++step) {
    CHECK(batches[step].samples == epochs().at(static_cast<std::int64_t>(step)));
    noises.insert(batches[step].noise.to_vector<float>());
  }
  CHECK(noises.size() == batches.size());
  on_all_ways([&](nn::DataLoaderOptions options) {
    manual_seed(3);
    const RandomKey before = Context::current().generator().state();
    DataLoader loader(epochs(), drawn, options);
    for (const Drawn& batch : batches) CHECK(loader.next() == batch);
    CHECK(Context::current().generator().state() == before);  // the caller's numbers are its own
    CHECK(loader.step() == 13);
  });
}

TEST_CASE("a loader goes on at any step, also while its workers are elsewhere") {
  const std::vector<Drawn> batches = expected();
  on_all_ways([&](nn::DataLoaderOptions options) {
    nn::EpochSampler sampler = epochs();
    sampler.set_step(5);
    DataLoader loader(sampler, drawn, options);
    for (const std::int64_t step : {5, 9, 0, 2, 2, 12}) {
      if (step != 5) loader.set_step(step);
      CHECK(loader.step() == step);
      CHECK(loader.next() == batches[static_cast<std::size_t>(step)]);
    }
    CHECK_THROWS_AS(loader.set_step(-1), ValueError);
    CHECK(loader.step() == 13);
  });
}

TEST_CASE("a loop goes to the end of its epoch, and a loop that was left goes on where it was") {
  const std::vector<Drawn> batches = expected(12);
  const std::int64_t steps = epochs().steps_per_epoch();
  REQUIRE(steps == 6);
  on_all_ways([&](nn::DataLoaderOptions options) {
    DataLoader loader(epochs(), drawn, options);
    std::size_t taken = 0;
    for (const Drawn& batch : loader.epoch()) {
      CHECK(batch == batches[taken++]);
      CHECK(loader.step() == static_cast<std::int64_t>(taken));
      if (taken == 2) break;
    }
    for (const int epoch : {0, 1}) {
      for (Drawn& batch : loader.epoch()) CHECK(std::exchange(batch, {}) == batches[taken++]);
      CHECK(loader.step() == (epoch + 1) * steps);
    }
  });
}

TEST_CASE("ranks have their parts of each batch, and numbers of their own") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    DataLoader whole(epochs(), drawn);
    DataLoader loader(epochs(world.rank(), world.size()), drawn, {.workers = 2});
    const Tensor sum = zeros({2});
    for (int step = 0; step < 8; ++step) {
      const Samples all = whole.next().samples;
      const Drawn mine = loader.next();
      const auto n = static_cast<std::int64_t>(all.size());
      const Samples part(all.begin() + n * world.rank() / world.size(),
                         all.begin() + n * (world.rank() + 1) / world.size());
      expect(mine.samples == part, "step {}", step);
      std::vector<std::vector<float>> firsts;
      for (int rank = 0; rank < world.size(); ++rank)
        firsts.push_back(
            DataLoader(epochs(rank, world.size()), [](Seen) { return rand({1}); }).next().to_vector<float>());
      expect(std::set(firsts.begin(), firsts.end()).size() == firsts.size(), "ranks draw alike");
      if (!part.empty()) add_(sum, mine.noise[0]);
    }
    world.group().all_reduce(sum);
    expect(sum[0].item() > 0, "what a worker made is this rank's to use");
  }));
}

TEST_CASE("what the function throws comes at its step, and the loader goes on") {
  on_all_ways([&](nn::DataLoaderOptions options) {
    const nn::BatchSampler sampler(1000, {.batch = 2, .seed = 1});
    const auto bad = [&](std::int64_t step) { return step % 3 == 1; };
    DataLoader loader(
        sampler,
        [&](Seen samples) {
          for (std::int64_t step = 0; step < 12; ++step)
            if (bad(step) && std::ranges::equal(samples, sampler.at(step)))
              fail<ValueError>("no sample {}", samples[0]);
          return Samples(samples.begin(), samples.end());
        },
        options);
    for (std::int64_t step = 0; step < 9; ++step) {
      INFO("step " << step);
      CHECK(loader.step() == step);
      if (bad(step))
        CHECK_THAT(message_of<ValueError>([&] { loader.next(); }),
                   ContainsSubstring(fmt::format("no sample {}", sampler.at(step)[0])));
      else
        CHECK(loader.next() == sampler.at(step));
    }
    // Tried again it fails again; and its end finds failures that nobody took.
    loader.set_step(7);
    CHECK_THROWS_AS(loader.next(), ValueError);
  });
}

TEST_CASE("workers are ahead by no more than they may be, and end with the loader") {
  on_all_ways([&](nn::DataLoaderOptions options) {
    std::atomic<int> begun = 0, under_way = 0, taken = 0;
    const int most = std::max(1, options.workers * options.ahead);
    {
      DataLoader loader(
          nn::BatchSampler(10),
          [&](Seen) {
            ++under_way;
            const int ahead = ++begun - taken;
            --under_way;
            return std::make_unique<int>(ahead);  // moved, never copied
          },
          options);
      for (int step = 0; step < 20; ++step) {
        CHECK(*loader.next() <= most + 1);  // one may be on its way to the caller
        ++taken;
      }
    }
    CHECK(under_way == 0);
    CHECK(begun >= 20);
    CHECK(begun <= 20 + most);
    for (int round = 0; round < 20; ++round) {  // ends at any moment of its workers'
      DataLoader loader(nn::BatchSampler(10), [](Seen) { return rand({64}); }, options);
      if (round % 2 == 0) loader.next();
      if (round % 3 == 0) loader.set_step(100);
    }
  });
}

TEST_CASE("signals of the process are for the program's own threads, not for workers") {
  on_all_ways([&](nn::DataLoaderOptions options) {
    DataLoader loader(
        nn::BatchSampler(10),
        [](Seen) {
          sigset_t mask;
          ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
          return ::sigismember(&mask, SIGTERM) == 1;
        },
        options);
    for (int step = 0; step < 5; ++step) CHECK(loader.next() == (options.workers > 0));
  });
}

TEST_CASE("tensors outlive the loader and the threads that made them, and record nothing") {
  Tensor kept;
  const Tensor weight = ones({3}).requires_grad_();
  for (const int workers : {0, 2}) {
    DataLoader loader(nn::BatchSampler(5), [&](Seen) { return mul(weight, rand({3})); },
                      {.workers = workers});
    kept = loader.next();
    CHECK_FALSE(kept.requires_grad());
  }
  CHECK(sum(kept).item() > 0);
}

TEST_CASE("a loader's workers take no thread's place in the order of random streams") {
  const auto of_new_thread = [] {
    std::vector<float> drawn;
    std::thread([&] { drawn = rand({4}).to_vector<float>(); }).join();
    return drawn;
  };
  manual_seed(11);
  const std::vector<float> first = of_new_thread();
  manual_seed(11);
  DataLoader loader(nn::BatchSampler(5), [](Seen) { return rand({3}); }, {.workers = 2});
  loader.next();
  CHECK(of_new_thread() == first);
}

TEST_CASE("a loader refuses what it cannot do") {
  const auto message = [](nn::DataLoaderOptions options) {
    return message_of<ValueError>([&] { DataLoader(nn::BatchSampler(5), drawn, options); });
  };
  CHECK_THAT(message({-1}), ContainsSubstring("DataLoader: -1 workers"));
  CHECK_THAT(message({513}), ContainsSubstring("DataLoader: 513 workers"));
  CHECK_THAT(message({2, 0}), ContainsSubstring("DataLoader: 0 batches ahead"));
}
