// What goes wrong in a sharded model, on one rank or on all: every rank hears of it by name, nobody hangs,
// and the next model trains.
#include <array>
#include <mutex>
#include <set>

#include "shard/fully_shard.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

struct Boom : std::runtime_error {
  Boom() : std::runtime_error("boom") {}
};

/// A net that throws where it is told to.
struct Fragile final : nn::Layer<Fragile> {
  nn::Linear first{5, 7}, second{7, 5}, third{5, 3}, extra{5, 2};  // nobody runs the last one
  bool throws_in_forward = false, throws_in_backward = false;
  Tensor forward(const Tensor& x) {
    const Tensor y = second(relu(first(x)));
    if (throws_in_forward) throw Boom();
    if (throws_in_backward && y.requires_grad())
      register_hook(y, [](const Tensor&) -> Tensor { throw Boom(); }).keep();
    return third(y);
  }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
    on("third", third);
    on("extra", extra);
  }
};

Fragile seeded_fragile() {
  manual_seed(5);
  return {};
}

void shard_all(Fragile& net, const shard::Options& options) {
  for (nn::Linear* layer : {&net.first, &net.second, &net.third, &net.extra})
    shard::fully_shard(*layer, options);
  shard::fully_shard(net, options);
}

Tensor loss_at(Fragile& net, int rank, int step) { return mean(square(net(batch_of(rank, step, 5).x))); }

struct ThrowBefore final : nn::ModuleObserver {
  void before_forward(nn::Module&, std::span<Tensor* const>) override { throw Boom(); }
};
struct ThrowAfter final : nn::ModuleObserver {
  void after_forward(nn::Module&, std::span<Tensor* const>) override { throw Boom(); }
};

/// Makes a step throw.
struct Fault {
  const char* name;
  std::function<void(Fragile&, nn::Optimizer&, int rank)> step;
};

void plain_step(Fragile& net, nn::Optimizer& optimizer, int rank, int step = 0) {
  optimizer.zero_grad();
  loss_at(net, rank, step).backward();
  optimizer.step();
}

template <class Observer>
void observed_step(nn::Module& module, Fragile& net, nn::Optimizer& optimizer, int rank) {
  Observer observer;
  const Subscription subscription = module.observe(observer);
  plain_step(net, optimizer, rank);
}

const std::vector<Fault>& faults() {
  static const std::vector<Fault> all = {
      {"forward",
       [](Fragile& net, nn::Optimizer& optimizer, int rank) {
         net.throws_in_forward = true;
         plain_step(net, optimizer, rank);
       }},
      {"a gradient hook",
       [](Fragile& net, nn::Optimizer& optimizer, int rank) {
         net.throws_in_backward = true;
         plain_step(net, optimizer, rank);
       }},
      {"an observer before forward",
       [](Fragile& net, nn::Optimizer& optimizer, int rank) {
         observed_step<ThrowBefore>(net.second, net, optimizer, rank);
       }},
      {"an observer after forward",
       [](Fragile& net, nn::Optimizer& optimizer, int rank) {
         observed_step<ThrowAfter>(net.second, net, optimizer, rank);
       }},
      {"the root's observer before forward",
       [](Fragile& net, nn::Optimizer& optimizer, int rank) {
         observed_step<ThrowBefore>(net, net, optimizer, rank);
       }},
      {"the root's observer after forward",
       [](Fragile& net, nn::Optimizer& optimizer, int rank) {
         observed_step<ThrowAfter>(net, net, optimizer, rank);
       }},
      {"a callback at the end of backward",
       [](Fragile& net, nn::Optimizer& optimizer, int rank) {
         Tensor x = batch_of(rank, 0, 5).x.requires_grad_();
         const Subscription hook = register_hook(x, [](const Tensor& g) {
           queue_backward_callback([] { throw Boom(); });
           return g;
         });
         mean(square(net(x))).backward();
         optimizer.step();
       }},
      {"the loss",
       [](Fragile& net, nn::Optimizer&, int rank) {
         const Tensor loss = loss_at(net, rank, 0);
         throw Boom();
       }},
      {"the optimizer",
       [](Fragile& net, nn::Optimizer& optimizer, int rank) {
         loss_at(net, rank, 0).backward();
         // No optimizer steps by a gradient of another shape.
         for (nn::Parameter& p : net.parameters()) p.set_grad(zeros({3, 1, 4}));
         optimizer.step();
       }},
  };
  return all;
}

/// The gradients of steps after a fault are those of replicas.
void expect_training(Fragile& net, World& world, const char* when) {
  Fragile by_hand = seeded_fragile();
  shard::load_full_state_dict(net, by_hand.state_dict());
  nn::Sgd sgd(net.parameters(), {.lr = 0.1}), reference(by_hand.parameters(), {.lr = 0.1});
  for (int step = 1; step < 3; ++step) {
    sgd.zero_grad();
    loss_at(net, world.rank(), step).backward();
    const Gradients expected =
        average_by_hand(by_hand, world.size(), [&](int rank) { loss_at(by_hand, rank, step).backward(); });
    expect_gradients(net, world, expected, when);
    set_gradients(by_hand, expected);
    sgd.step();
    reference.step();
  }
  expect_values(net, by_hand, when);
}

void expect_next_model_trains(World& world, const shard::Options& options, const char* when) {
  Fragile net = seeded_fragile();
  shard_all(net, options);
  expect_training(net, world, when);
}

/// What the ranks heard; each writes its own.
using Heard = std::vector<std::string>;

/// Every rank hears of rank `culprit`, who is not lost in a hang.
void expect_named(const Heard& heard, int culprit) {
  for (std::size_t rank = 0; rank < heard.size(); ++rank) {
    if (static_cast<int>(rank) == culprit) continue;
    INFO("rank " << rank << " heard: " << heard[rank]);
    CHECK_THAT(heard[rank], ContainsSubstring(fmt::format("rank {}", culprit)));
  }
}

/// Runs `body` on every rank of a world, keeping what it throws, which goes on.
Heard listen(int ranks, const std::function<void(World&)>& body) {
  Heard heard(static_cast<std::size_t>(ranks));
  try {
    run_ranks(ranks, [&](World& world) {
      try {
        body(world);
      } catch (const std::exception& error) {
        heard[static_cast<std::size_t>(world.rank())] = error.what();
        throw;
      }
    });
  } catch (const std::exception&) {
  }
  return heard;
}

/// Rank `culprit` does `wrong` while the others do `right`; who hears a CollectiveError renews the world, and
/// the next model trains in it.
Heard recover(int ranks, int culprit, const shard::Options& options,
              const std::function<void(Fragile&, World&)>& right,
              const std::function<void(Fragile&, World&)>& wrong) {
  Heard heard(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](World& world) {
    {
      Fragile net = seeded_fragile();
      shard_all(net, options);
      try {  // a rank may hear of the fault in a call before it
        loss_at(net, world.rank(), 0).backward();
        (world.rank() == culprit ? wrong : right)(net, world);
        for (int i = 0; i < 2; ++i) loss_at(net, world.rank(), 1).backward();
        world.group().barrier();
      } catch (const CollectiveError& error) {
        heard[static_cast<std::size_t>(world.rank())] = error.what();
      }
    }
    expect(world.group().failed(), "rank {} heard nothing", world.rank());
    world.group().renew();
    expect_next_model_trains(world, options, "in the renewed world");
  });
  return heard;
}

const std::array<shard::Options, 3> settings = {
    shard::Options{}, shard::Options{.layout = shard::GroupLayout::flat},
    shard::Options{.strategy = shard::ShardingStrategy::shard_grad_op}};

template <class F>
void for_each_setting(F&& check) {
  for (const int ranks : {2, 3})
    for (std::size_t s = 0; s < settings.size(); ++s) {
      INFO(ranks << " ranks, setting " << s);
      check(ranks, settings[s]);
    }
}

}  // namespace

TEST_CASE("an exception on one rank is named on every rank, and the next model trains", "[faults]") {
  for_each_setting([](int ranks, const shard::Options& options) {
    for (const Fault& fault : faults()) {
      const int culprit = ranks - 1;
      INFO(fault.name);
      const Heard heard = listen(ranks, [&](World& world) {
        Fragile net = seeded_fragile();
        shard_all(net, options);
        nn::Sgd sgd(net.parameters());
        plain_step(net, sgd, world.rank());
        if (world.rank() == culprit) fault.step(net, sgd, world.rank());
        for (int step = 0; step < 3; ++step) plain_step(net, sgd, world.rank(), step);
        world.group().barrier();
      });
      CHECK(!heard[static_cast<std::size_t>(culprit)].empty());
      expect_named(heard, culprit);
      CHECK_NOTHROW(
          run_ranks(ranks, [&](World& world) { expect_next_model_trains(world, options, fault.name); }));
    }
  });
}

TEST_CASE("an exception on every rank leaves a model that trains", "[faults]") {
  for_each_setting([](int ranks, const shard::Options& options) {
    for (const Fault& fault : faults()) {
      INFO(fault.name);
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Fragile net = seeded_fragile();
        shard_all(net, options);
        nn::Sgd sgd(net.parameters());
        for (int times = 0; times < 2; ++times) {
          bool thrown = false;
          try {
            fault.step(net, sgd, world.rank());
          } catch (const CollectiveError&) {
            throw;
          } catch (const std::exception&) {
            thrown = true;
          }
          expect(thrown, "{}: nothing was thrown", fault.name);
          net.throws_in_forward = net.throws_in_backward = false;
          expect_training(net, world, fault.name);
        }
      }));
    }
  });
}

TEST_CASE("a module that only some ranks run fails on every rank, and the next model trains", "[faults]") {
  for_each_setting([](int ranks, const shard::Options& options) {
    for (const int culprit : {0, ranks - 1}) {
      const auto nothing = [](Fragile&, World&) {};
      const auto extra = [](Fragile& net, World& world) { net.extra(batch_of(world.rank(), 1, 5).x); };
      const auto forward = [](Fragile& net, World& world) {
        loss_at(net, world.rank(), 1);
        shard::reshard(net);  // or the next forward would make up for this one's gathers
      };
      const auto backward = [](Fragile& net, World& world) { loss_at(net, world.rank(), 1).backward(); };
      const std::array<std::function<void(Fragile&, World&)>, 3> acts = {extra, forward, backward};
      for (std::size_t act = 0; act < acts.size(); ++act) {
        INFO("act " << act << " by rank " << culprit);
        for (const std::string& text : recover(ranks, culprit, options, nothing, acts[act]))
          CHECK(!text.empty());
      }
    }
  });
}

TEST_CASE("a rank that swallows its exception and goes on alone is heard of by all", "[faults]") {
  for_each_setting([](int ranks, const shard::Options& options) {
    const auto swallow = [](Fragile& net, World& world) {
      net.throws_in_forward = true;
      try {
        loss_at(net, world.rank(), 1).backward();
      } catch (const Boom&) {
      }
      net.throws_in_forward = false;
    };
    const auto go_on = [](Fragile& net, World& world) { loss_at(net, world.rank(), 1).backward(); };
    for (const std::string& text : recover(ranks, ranks - 1, options, go_on, swallow)) CHECK(!text.empty());
  });
}

TEST_CASE("a model dies while its gathers and reductions are under way", "[faults]") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (int i = 0; i < 3; ++i) {
      Fragile net = seeded_fragile();
      shard_all(net, {.layout = layout, .forward_prefetch = 3});
      loss_at(net, world.rank(), 0).backward();
      loss_at(net, world.rank(), 1);
      if (i == 1) net.first(batch_of(world.rank(), 1, 5).x);
    }
    expect_next_model_trains(world, {.layout = layout}, "after models that were given up");
  });
}
