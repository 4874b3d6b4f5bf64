// Worlds: how ranks start, what they take over, how they end, and who hears why.
#include "collectives/world.h"

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "autograd/autograd.h"
#include "collectives/observe.h"
#include "runtime/float32_precision.h"
#include "runtime/ops.h"
#include "runtime/parallel.h"
#include "tests/catch.h"
#include "tests/ranks.h"

using namespace sherd;
using Catch::Matchers::ContainsSubstring;
using sherd::test::expect;
using sherd::test::message_of;
using sherd::test::RankFailure;

namespace {

/// What each rank answered, by rank.
template <class T, class F>
std::vector<T> from_ranks(int ranks, const F& answer) {
  std::vector<T> answers(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](World& world) { answers[static_cast<std::size_t>(world.rank())] = answer(world); });
  return answers;
}

template <class T>
std::vector<T> all_same(int ranks, T value) {
  return std::vector<T>(static_cast<std::size_t>(ranks), value);
}

std::size_t threads_of_process() {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/task"),
                                                std::filesystem::directory_iterator()));
}

/// Restores what a test changes about its own thread.
class ContextKept {
 public:
  ~ContextKept() {
    context_.generator().set_state(generator_);
    context_.set_threads(threads_);
  }

 private:
  Context& context_ = Context::current();
  RandomKey generator_ = context_.generator().state();
  int threads_ = context_.threads();
};

}  // namespace

TEST_CASE("every rank has a thread and a number of its own") {
  for (int ranks : {1, 2, 3, 8}) {
    const auto threads =
        from_ranks<std::thread::id>(ranks, [](World&) { return std::this_thread::get_id(); });
    std::set<std::thread::id> distinct(threads.begin(), threads.end());
    distinct.insert(std::this_thread::get_id());
    CHECK(distinct.size() == static_cast<std::size_t>(ranks) + 1);
    std::vector<int> numbers(static_cast<std::size_t>(ranks));
    std::iota(numbers.begin(), numbers.end(), 0);
    CHECK(from_ranks<int>(ranks, [](World& w) { return w.rank(); }) == numbers);
    CHECK(from_ranks<int>(ranks, [](World& w) { return w.local_rank(); }) == numbers);
    CHECK(from_ranks<int>(ranks, [](World& w) { return w.size(); }) == all_same(ranks, ranks));
    CHECK(from_ranks<int>(ranks, [](World& w) { return w.local_size(); }) == all_same(ranks, ranks));
  }
}

TEST_CASE("0 ranks means one a core") {
  std::atomic<int> bodies = 0, size = 0;
  run_ranks(0, [&](World& world) {
    ++bodies;
    size = world.size();
  });
  CHECK(bodies == size);
  CHECK(size == std::max(1, static_cast<int>(std::thread::hardware_concurrency())));
}

TEST_CASE("fewer than no ranks are refused") {
  CHECK(message_of<ValueError>([] { run_ranks(-1, [](World&) {}); }) ==
        "run_ranks: -1 ranks asked for; 1 or more, or 0 for as many as there are");
}

TEST_CASE("ranks begin with their parent's seed and position, and draw alike") {
  const ContextKept kept;
  for (int drawn : {0, 7, 1000}) {
    manual_seed(42);
    if (drawn > 0) rand({drawn});
    const RandomKey parent = Context::current().generator().state();
    const auto keys = from_ranks<RandomKey>(3, [](World&) { return Context::current().generator().state(); });
    CHECK(keys == all_same(3, parent));
    const auto drawings =
        from_ranks<std::vector<float>>(3, [](World&) { return rand({5}).to_vector<float>(); });
    CHECK(Context::current().generator().state() == parent);  // what ranks draw is theirs
    CHECK(drawings == all_same(3, rand({5}).to_vector<float>()));
  }
}

TEST_CASE("ranks begin with their parent's grad mode, and change only their own") {
  for (bool enabled : {true, false}) {
    const GradMode mode(enabled);
    CHECK(from_ranks<int>(2, [&](World&) {
            const bool before = Context::current().grad_enabled();
            Context::current().set_grad_enabled(!enabled);
            return before;
          }) == all_same<int>(2, enabled));
    CHECK(Context::current().grad_enabled() == enabled);
  }
}

TEST_CASE("a parent's threads are shared equally among its ranks, at least one each") {
  const ContextKept kept;
  for (int threads : {1, 2, 5, 16})
    for (int ranks : {1, 2, 3, 8}) {
      Context::current().set_threads(threads);
      CHECK(from_ranks<int>(ranks, [](World&) { return Context::current().threads(); }) ==
            all_same(ranks, std::max(1, threads / ranks)));
      CHECK(Context::current().threads() == threads);
    }
}

TEST_CASE("with one thread a rank nothing is forked") {
  const ContextKept kept;
  Context::current().set_threads(2);
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    world.group().barrier();
    const std::size_t before = threads_of_process();
    world.group().barrier();
    std::mutex mutex;
    std::set<std::thread::id> workers;
    parallel_for(10000, 1, [&](std::int64_t, std::int64_t) {
      const std::scoped_lock lock(mutex);
      workers.insert(std::this_thread::get_id());
    });
    const Tensor x = full({1 << 20}, 1);
    expect(sum(add(x, x)).item<int>() == 1 << 21, "a large op");
    world.group().all_reduce(x);
    world.group().barrier();
    expect(workers == std::set{std::this_thread::get_id()}, "{} threads ran tiles", workers.size());
    expect(threads_of_process() == before, "{} threads, {} before", threads_of_process(), before);
    world.group().barrier();
  }));
}

TEST_CASE("listeners, interceptions and logs stay with the parent") {
  const OrderLog log;
  int intercepted = 0;
  const Interception count([&](const ObservedCall& call, const Interception::Proceed& proceed) {
    ++intercepted;
    proceed(call.collective);
  });
  const std::uint64_t calls = collective_calls();
  CHECK(from_ranks<std::uint64_t>(2, [](World& world) {
          world.group().barrier();
          return collective_calls();
        }) == all_same<std::uint64_t>(2, 1));
  CHECK(log.lines().empty());
  CHECK(intercepted == 0);
  CHECK(collective_calls() == calls);
}

TEST_CASE("worlds follow one another, of any size") {
  for (int round = 0; round < 20; ++round)
    for (int ranks : {3, 1, 4}) {
      const auto sums = from_ranks<double>(ranks, [](World& world) {
        Tensor x = full({1}, world.rank() + 1);
        world.group().all_reduce(x);
        return x.item();
      });
      CHECK(sums == all_same(ranks, ranks * (ranks + 1) / 2.0));
    }
}

TEST_CASE("a world after one that failed is whole again") {
  for (int culprit = 0; culprit < 3; ++culprit) {
    CHECK_THROWS_AS(run_ranks(3,
                              [&](World& world) {
                                if (world.rank() == culprit) throw RankFailure("no");
                                world.group().barrier();
                              }),
                    RankFailure);
    CHECK_NOTHROW(run_ranks(3, [](World& world) { world.group().barrier(); }));
  }
}

TEST_CASE("worlds nest: each rank may be the parent of ranks of its own") {
  CHECK_NOTHROW(run_ranks(2, [](World& outer) {
    Tensor total = zeros({1});
    std::mutex mutex;
    run_ranks(3, [&](World& inner) {
      expect(&World::current() == &inner && inner.size() == 3, "the innermost");
      Tensor x = full({1}, inner.rank() + 1);
      inner.group().all_reduce(x);
      const std::scoped_lock lock(mutex);
      add_(total, x);
    });
    expect(&World::current() == &outer, "and then the outer one again");
    expect(total.item<int>() == 18, "three ranks saw 6 each, got {}", total.item<int>());
    outer.group().all_reduce(total);
    expect(total.item<int>() == 36, "the outer ranks still reach each other");
  }));
}

TEST_CASE("nested ranks inherit from the rank that starts them") {
  const ContextKept kept;
  Context::current().set_threads(4);
  CHECK_NOTHROW(run_ranks(2, [](World& outer) {
    manual_seed(static_cast<std::uint64_t>(outer.rank()));
    const NoGrad guard;
    const DefaultOptions defaults({.dtype = outer.rank() == 0 ? f64 : bf16, .device = Device::meta()});
    const auto precision = outer.rank() == 0 ? Float32MatmulPrecision::highest : Float32MatmulPrecision::high;
    const Float32MatmulPrecisionScope products(precision);
    const RandomKey parent = Context::current().generator().state();
    run_ranks(2, [&](World&) {
      const Tensor made = zeros({2});
      expect(made.dtype() == (outer.rank() == 0 ? f64 : bf16), "default dtype");
      expect(made.device() == Device::meta(), "default device");
      expect(Context::current().generator().state() == parent, "seed");
      expect(!Context::current().grad_enabled(), "grad mode");
      expect(Context::current().threads() == 1, "threads");
      expect(float32_matmul_precision() == precision, "precision of products");
    });
  }));
}

TEST_CASE("a failure within goes through both worlds") {
  CHECK(message_of<RankFailure>([] {
          run_ranks(2, [](World& outer) {
            run_ranks(2, [&](World& inner) {
              if (outer.rank() == 1 && inner.rank() == 1) throw RankFailure("deep");
              inner.group().barrier();
            });
            outer.group().barrier();
          });
        }) == "deep");
}

TEST_CASE("the root cause is thrown, not what it caused elsewhere") {
  for (int ranks : {1, 2, 3, 5})
    for (int culprit = 0; culprit < ranks; ++culprit) {
      CHECK(message_of<RankFailure>([&] {
              run_ranks(ranks, [&](World& world) {
                if (world.rank() == culprit) throw RankFailure(fmt::format("rank {} had enough", culprit));
                world.group().barrier();
              });
            }) == fmt::format("rank {} had enough", culprit));
    }
}

TEST_CASE("of several causes the lowest rank's is thrown") {
  CHECK(message_of<RankFailure>([] {
          run_ranks(4, [&](World& world) {
            if (world.rank() >= 1) throw RankFailure(fmt::format("{}", world.rank()));
          });
        }) == "1");
}

TEST_CASE("where only peers are to blame, the lowest rank's report is thrown") {
  const std::string text = message_of<CollectiveError>([] {
    run_ranks(3, [](World& world) {
      if (world.rank() != 1) world.group().barrier();
    });
  });
  CHECK_THAT(text, ContainsSubstring("rank 1 left the body"));
}

TEST_CASE("exceptions of any type come through") {
  CHECK_THROWS_AS(run_ranks(2, [](World&) { throw 7; }), int);
  CHECK_THROWS_AS(run_ranks(2, [](World& world) { world.group().all_reduce(zeros({2}, {DType::boolean})); }),
                  DTypeError);
}

TEST_CASE("what a rank threw is told to those who wait for it") {
  std::vector<std::string> heard(3);
  CHECK_THROWS_AS(run_ranks(3,
                            [&](World& world) {
                              if (world.rank() == 2) throw RankFailure("out of paper");
                              try {
                                world.group().barrier({.label = "the end"});
                              } catch (const CollectiveError& error) {
                                heard[static_cast<std::size_t>(world.rank())] = error.what();
                                expect(error.ranks() == std::vector<int>{2}, "who");
                                expect(error.sequence() == 0, "when");
                              }
                            }),
                  RankFailure);
  for (int rank : {0, 1}) {
    CHECK_THAT(heard[static_cast<std::size_t>(rank)], ContainsSubstring("rank 2 threw \"out of paper\""));
    CHECK_THAT(heard[static_cast<std::size_t>(rank)], ContainsSubstring("'the end'"));
  }
}

TEST_CASE("ranks that are left go on in groups that are whole") {
  CHECK_THROWS_AS(run_ranks(4,
                            [](World& world) {
                              const Group pair = world.group().blocks(2);
                              if (world.rank() == 3) throw RankFailure("gone");
                              for (int i = 0; i < 5 && world.rank() < 2; ++i) {
                                Tensor x = full({1}, 1);
                                pair.all_reduce(x);
                                if (x.item<int>() != 2) throw InternalError("the pair is whole");
                              }
                              const auto fails = [](const Group& group) {
                                try {
                                  group.barrier();
                                } catch (const CollectiveError&) {
                                  return true;
                                }
                                return false;
                              };
                              if (!fails(world.group()) || !world.group().failed())
                                throw InternalError("the world is not");
                              if (fails(pair) != (world.rank() == 2))
                                throw InternalError("nor is the other pair");
                            }),
                  RankFailure);
}

TEST_CASE("World::current is the rank's own world, and an error elsewhere") {
  const auto elsewhere = [] {
    std::string text;
    std::thread([&] { text = message_of<StateError>([] { World::current(); }); }).join();
    return text;
  };
  CHECK_THAT(elsewhere(), ContainsSubstring("this thread is no rank"));
  CHECK(from_ranks<int>(3, [](World& world) { return &World::current() == &world; }) == all_same(3, 1));
  for (const std::string& text : from_ranks<std::string>(2, [&](World&) { return elsewhere(); }))
    CHECK_THAT(text, ContainsSubstring("this thread is no rank"));
}

TEST_CASE("init without a launcher is a world of one, the same one each time") {
  std::string problem;
  std::thread([&] {  // so that the world ends with this case
    try {
      World& world = init();
      expect(world.size() == 1 && world.rank() == 0, "alone");
      expect(world.local_size() == 1 && world.local_rank() == 0, "alone on its machine");
      expect(&init() == &world && &World::current() == &world, "one world");
      Tensor x = full({2}, 3);
      world.group().all_reduce(x);
      world.group().barrier();
      expect(sum(x).item<int>() == 6, "nobody to add to it");
    } catch (const std::exception& e) {
      problem = e.what();
    }
  })
      .join();
  CHECK(problem.empty());
}

TEST_CASE("inside a rank init is that rank's world") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) { expect(&init() == &world, "no new world"); }));
}

TEST_CASE("groups belong to the thread that made them") {
  const std::string text = message_of<StateError>([] {
    run_ranks(1, [](World& world) {
      std::exception_ptr error;
      std::thread([&] {
        try {
          world.group().barrier();
        } catch (...) {
          error = std::current_exception();
        }
      }).join();
      if (error) std::rethrow_exception(error);
    });
  });
  CHECK_THAT(text, ContainsSubstring("belongs to another thread's rank"));
}

TEST_CASE("tensors outlive the ranks that made them") {
  std::vector<Tensor> kept(4);
  run_ranks(4, [&](World& world) {
    Tensor x = full({100000}, world.rank());
    world.group().broadcast(x, 3);
    kept[static_cast<std::size_t>(world.rank())] = x;
  });
  for (const Tensor& x : kept) CHECK(sum(x).item() == 300000);
}

namespace {

/// The environment that torchrun gives its processes, for the time of a scope.
class Launched {
 public:
  Launched(const char* rank, const char* size) {
    setenv("RANK", rank, 1);
    setenv("WORLD_SIZE", size, 1);
  }
  ~Launched() {
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
  }
  Launched(const Launched&) = delete;
  Launched& operator=(const Launched&) = delete;
};

}  // namespace

TEST_CASE("a launcher's processes are the ranks, as many as there are") {
  const Launched launched("0", "2");
  CHECK(message_of<ValueError>([] { run_ranks(3, [](World&) {}); }) ==
        "run_ranks: 3 ranks asked for, but the launcher started 2 processes; start 3 or pass 0");
}

TEST_CASE("a launcher of one process leaves the choice of threads") {
  const Launched launched("0", "1");
  CHECK(from_ranks<int>(3, [](World& world) { return world.size(); }) == all_same(3, 3));
}

TEST_CASE("what a launcher says wrongly is an error of run_ranks") {
  const Launched launched("2", "2");
  CHECK_THAT(message_of<ValueError>([] { run_ranks(2, [](World&) {}); }),
             ContainsSubstring("RANK is 2 and WORLD_SIZE is 2"));
}
