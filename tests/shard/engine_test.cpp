// What decides when a group is here and what a backward does: program position and policy, not what one rank
// happens to read, write or throw.
#include <array>
#include <atomic>
#include <thread>

#include "autograd/autograd.h"
#include "collectives/differentiable.h"
#include "collectives/observe.h"
#include "shard/data_parallel.h"
#include "shard/fsdp.h"
#include "shard/fully_shard.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// tanh of its layer, unless told to pass on what it gets.
struct Link final : nn::Layer<Link> {
  nn::Linear layer;
  bool used = true;
  explicit Link(std::int64_t width) : layer(width, width) {}
  Tensor forward(const Tensor& x) const { return used ? tanh(layer(x)) : x; }
  void visit(auto&& on) { on("layer", layer); }
};

/// Some links, from `first` on.
struct Links {
  std::size_t first = 0, count = 0;
};

/// Links in a row, with something between the first and the second. Some of them are one region.
struct Chain final : nn::Layer<Chain> {
  nn::ModuleList<Link> links;
  std::function<Tensor(const Tensor&)> between;
  Links region{};
  explicit Chain(std::int64_t width = 5, int count = 3) {
    manual_seed(3);
    for (int i = 0; i < count; ++i) links.emplace_back(width);
  }
  Tensor forward(const Tensor& x) {
    const std::size_t end = region.first + region.count;
    Tensor y = run(0, region.first, x);
    if (region.count > 0) y = recompute([&] { return run(region.first, end, y); });
    return run(end, links.size(), y);
  }
  Tensor run(std::size_t from, std::size_t to, Tensor y) {
    for (std::size_t i = from; i < to; ++i) {
      y = links[i](y);
      if (i == 0 && between) y = between(y);
    }
    return y;
  }
  void visit(auto&& on) { on("links", links); }
};

void shard_links(Chain& c, const shard::Options& options) {
  for (Link& link : c.links) shard::fully_shard(link, options);
  shard::fully_shard(c, options);
}

Tensor input_of(int rank, std::int64_t width = 5) { return batch_of(rank, 0, width).x; }

struct Boom : std::runtime_error {
  Boom() : std::runtime_error("boom") {}
};

/// The gathers that `act` makes, in order, as labels.
template <class F>
std::vector<std::string> gathers_of(F&& act) {
  const OrderLog log;
  act();
  std::vector<std::string> gathers;
  for (const std::string& line : log.lines())
    if (line.find("all_gather") != std::string::npos) gathers.push_back(line.substr(line.find(" of ")));
  return gathers;
}

Gradients averages(Chain& by_hand, World& world, const std::function<Tensor(Chain&, int)>& loss) {
  return average_by_hand(by_hand, world.size(), [&](int rank) { loss(by_hand, rank).backward(); });
}

}  // namespace

TEST_CASE("what stays after backward stays on ranks that do not read it too") {
  on_ranks_and_widths([](World& world, shard::GroupLayout layout, std::int64_t width) {
    Chain by_hand(width), c(width);
    shard_links(c, {.layout = layout});
    shard::set_reshard_after_backward(c, false);
    const auto loss = [&](Chain& chain, int rank) {
      chain.links[1].used = rank == 0;
      return sum(chain(input_of(rank, width)));
    };
    for (int times = 0; times < 3; ++times) {
      c.zero_grad();
      const auto gathers = gathers_of([&] { loss(c, world.rank()).backward(); });
      expect(times == 0 || gathers.size() == 3, "{} gathers: forward frees, backward keeps", gathers.size());
      expect_gradients(c, world, averages(by_hand, world, loss), "kept after backward");
    }
  });
}

TEST_CASE("what is read before a backward reaches a root changes nothing in its plan") {
  on_ranks_and_widths([](World& world, shard::GroupLayout layout, std::int64_t width) {
    Chain by_hand(width), c(width);
    shard_links(c, {.layout = layout});
    const auto loss = [&](Chain& chain, int rank) {
      const Tensor y = sum(chain(input_of(rank, width)));
      const Tensor g = sum(square(chain.links[0].layer.weight));
      return rank == 0 ? add(y, g) : y;
    };
    for (int times = 0; times < 2; ++times) {
      c.zero_grad();
      loss(c, world.rank()).backward();
      expect_gradients(c, world, averages(by_hand, world, loss), "a penalty on one rank");
    }
  });
}

TEST_CASE(
    "gathers before a root runs have the name of the module's class and which part of the model it is") {
  on_ranks_and_widths([](World& world, shard::GroupLayout layout, std::int64_t width) {
    Chain c(width);
    shard_links(c, {.layout = layout});
    for (const std::string& label : gathers_of([&] { square(c.links[1].layer.weight); }))
      expect(label.find("'Link, part 2") != std::string::npos, "{}", label);
    c(input_of(world.rank(), width));
    shard::reshard(c);
    for (const std::string& label : gathers_of([&] { square(c.links[1].layer.weight); }))
      expect(label.find("'links.1") != std::string::npos, "{}", label);
  });
}

TEST_CASE("ranks that use different groups may call each other within the graph", "[threads meet]") {
  on_ranks_and_widths([](World& world, shard::GroupLayout layout, std::int64_t width) {
    Chain c(width);
    c.between = [&](const Tensor& y) { return enter_parallel(world.group(), y); };
    shard_links(c, {.layout = layout});
    for (const int user : {0, world.size() - 1}) {
      c.links[1].used = c.links[2].used = world.rank() == user;
      for (int times = 0; times < 2; ++times) {
        c.zero_grad();
        sum(c(input_of(world.rank(), width))).backward();
      }
      Chain alone(width);
      alone.links[1].used = alone.links[2].used = true;
      expect(c.links[0].layer.weight.grad().defined() || c.links[0].layer.weight.local().numel() == 0,
             "the first link has no gradient");
    }
  });
}

namespace {

/// What a program may call within its graph: with a gradient that calls, with a call in the forward, both,
/// and among some of the ranks.
std::vector<std::function<Tensor(const Tensor&)>> calls_within(World& world) {
  const Group all = world.group(), ends = all.subgroup({0, all.size() - 1});
  return {[=](const Tensor& y) { return enter_parallel(all, y); },
          [=](const Tensor& y) { return sum_partials(all, y); },
          [=](const Tensor& y) { return tanh(sum_partials(all, enter_parallel(all, y))); },
          [=](const Tensor& y) { return scatter_sums(all, gather_params(all, y)); },
          [=](const Tensor& y) { return ends.defined() ? sum_partials(ends, enter_parallel(ends, y)) : y; }};
}

/// One rank uses other groups than the rest, before or after a call, within a region or not: gradients are
/// those without a region.
void expect_calls_within_regions(World& world, const shard::Options& options, const Group& shards,
                                 std::int64_t width) {
  const auto calls = calls_within(world);
  for (std::size_t call = 0; call < calls.size(); ++call) {
    Chain c(width, 4);
    c.between = calls[call];
    shard_links(c, options);
    for (const int user : {0, world.size() - 1})
      for (const unsigned mask : {1u, 4u, 7u}) {
        for (unsigned i = 0; i < 3; ++i)
          c.links[i + 1].used = (world.rank() == user) == ((mask >> i & 1) != 0);
        const auto gradients_with = [&](const Links& region) {
          c.region = region;
          c.zero_grad();
          sum(c(input_of(world.rank(), width))).backward();
          return whole_gradients(c, shards);
        };
        const Gradients expected = gradients_with({});
        for (const Links region : {Links{0, 2}, Links{0, 4}, Links{1, 3}}) {
          const std::string found = difference(gradients_with(region), expected);
          expect(found.empty(), "call {}, user {}, mask {}, links {} to {}: {}", call, user, mask,
                 region.first, region.first + region.count, found);
        }
      }
  }
}

}  // namespace

TEST_CASE("ranks that use different groups may call each other within regions that run again",
          "[threads meet]") {
  on_ranks_and_widths([](World& world, shard::GroupLayout layout, std::int64_t width) {
    for (const int ahead : {0, 1})  // a gather ahead may come before a call that would otherwise precede it
      expect_calls_within_regions(world, {.layout = layout, .backward_prefetch = ahead}, world.group(),
                                  width);
  });
  for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
    CHECK_NOTHROW(run_ranks(4, [&](World& world) {
      const DeviceMesh mesh = world.mesh({2, 2}, {"replica", "shard"});
      expect_calls_within_regions(world, {.mesh = mesh, .layout = layout}, mesh.group("shard"), 5);
    }));
}

TEST_CASE("what is read after its module, or after the forward, may be read on some ranks when others call",
          "[threads meet]") {
  on_ranks_and_widths([](World& world, shard::GroupLayout layout, std::int64_t width) {
    Chain c(width);
    shard_links(c, {.layout = layout});
    const auto penalty = [&](std::size_t link) { return sum(square(c.links[link].layer.weight.tensor())); };
    for (const int user : {0, world.size() - 1})
      for (const bool again : {false, true}) {
        const auto weight_within = [&](bool called) {
          c.between = [&, called](const Tensor& y) {
            const Tensor before = penalty(0);
            const Tensor z = called ? enter_parallel(world.group(), y) : y;
            return world.rank() == user ? mul(z, penalty(0)) : add(z, before.detach());  // still here
          };
          c.zero_grad();
          Tensor loss = sum(c(input_of(world.rank(), width)));
          if (called) loss = enter_parallel(world.group(), loss);
          const Tensor late = add(penalty(1), penalty(2)), later = penalty(0);  // each frees the one before
          if (world.rank() == user) loss = add(loss, add(late, later));
          loss.backward({}, again);
          if (again) loss.backward();
          return whole_gradients(c, world.group());
        };
        weight_within(false);
        weight_within(true);  // ends
        c.between = nullptr;
      }
  });
}

TEST_CASE("a region keeps what a call gave it: a backward calls no more than without the region") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Chain c;
    shard_links(c, {.layout = layout});
    const auto calls_of = [&](const Links& region) {
      c.region = region;
      const std::uint64_t before = collective_calls();
      sum(c(input_of(world.rank()))).backward();
      return collective_calls() - before;
    };
    for (const auto& call : calls_within(world)) {
      c.between = call;
      calls_of({});
      const std::uint64_t plainly = calls_of({});
      expect(calls_of({0, 3}) == plainly, "{} calls", plainly);
    }
    c.region = {0, 3};
    const auto refused = [&](const std::function<Tensor(const Tensor&)>& between) {
      c.between = between;
      return message_of<StateError>([&] { c(input_of(world.rank())); });
    };
    const std::string written = refused([&](const Tensor& y) {
      const Tensor z = sum_partials(world.group(), y);
      return add_(z, 1.0);
    });
    expect(written.find("result of a call among ranks") != std::string::npos, "{}", written);
    const std::string in_place = refused([&](const Tensor& y) {
      const NoGrad guard;
      const Tensor scale = mean(y);
      world.group().all_reduce(scale);
      const GradMode on(true);
      return mul(y, tanh(scale));
    });
    expect(in_place.find("call among ranks in place") != std::string::npos, "{}", in_place);
    c.between = nullptr;
    sum(c(input_of(world.rank()))).backward();
  });
}

TEST_CASE("the same model trains on after a forward that threw on one rank, and a renewal on all") {
  on_ranks_and_widths([](World& world, shard::GroupLayout layout, std::int64_t width) {
    for (const auto strategy :
         {shard::ShardingStrategy::full_shard, shard::ShardingStrategy::shard_grad_op}) {
      Chain by_hand(width), c(width);
      shard_links(c, {.layout = layout, .strategy = strategy});
      const auto loss = [&](Chain& chain, int rank) { return sum(chain(input_of(rank, width))); };
      loss(c, world.rank()).backward();
      for (const bool in_forward : {true, false}) {
        bool thrown = false;
        try {
          c.between = [&](const Tensor& y) -> Tensor {
            if (world.rank() == 0 && in_forward) throw Boom();
            if (world.rank() == 0) register_hook(y, [](const Tensor&) -> Tensor { throw Boom(); }).keep();
            return y;
          };
          try {
            loss(c, world.rank()).backward();
          } catch (const Boom&) {
            thrown = true;
          }
          c.between = nullptr;
          if (thrown) world.group().barrier({.label = "not theirs"});  // so that all hear of it
          for (;;) loss(c, world.rank()).backward();
        } catch (const CollectiveError&) {
        }
        c.between = nullptr;
        world.group().renew();
        for (int times = 0; times < 2; ++times) {
          c.zero_grad();
          loss(c, world.rank()).backward();
          expect_gradients(c, world, averages(by_hand, world, loss), "after a renewal");
        }
      }
    }
  });
}

namespace {

/// A layer that a forward may leave out.
struct Optional final : nn::Layer<Optional> {
  nn::Linear first{5, 5}, extra{5, 5};
  Tensor forward(const Tensor& x, bool with_extra) const {
    const Tensor y = tanh(first(x));
    return with_extra ? extra(y) : y;
  }
  void visit(auto&& on) {
    on("first", first);
    on("extra", extra);
  }
};

}  // namespace

TEST_CASE("ranks that came to different ends of a backward reduce the same after a renewal") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    manual_seed(3);
    Optional by_hand;
    Optional net = by_hand.clone();
    for (nn::Linear* layer : {&net.first, &net.extra}) shard::fully_shard(*layer, {.layout = layout});
    shard::fully_shard(net, {.layout = layout});
    const bool culprit = world.rank() == world.size() - 1;
    {
      const auto guard = shard::no_sync(net);
      sum(net(input_of(world.rank()), true)).backward();
    }
    try {
      Tensor x = input_of(world.rank()).requires_grad_();
      register_hook(x,
                    [&](const Tensor&) -> Tensor {  // by now all reductions are posted
                      if (culprit) throw Boom();
                      return {};
                    })
          .keep();
      try {
        sum(net(mul(x, 2.0), true)).backward();
      } catch (const Boom&) {
        world.group().barrier({.label = "not theirs"});
      }
      for (;;) sum(net(x, true)).backward();
    } catch (const CollectiveError&) {
    }
    world.group().renew();
    for (const bool with_extra : {false, true, false}) {
      net.zero_grad();
      const auto loss = [&](Optional& o, int rank) { return sum(o(input_of(rank), with_extra)); };
      loss(net, world.rank()).backward();
      expect_gradients(
          net, world,
          average_by_hand(by_hand, world.size(), [&](int rank) { loss(by_hand, rank).backward(); }),
          "after a renewal");
    }
  });
}

TEST_CASE("a shard is not written while a slow peer still reads it", "[threads meet]") {
  for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
    CHECK_NOTHROW(run_ranks(4, [&](World& world) {
      for (int trial = 0; trial < 20; ++trial) {
        Chain by_hand(64), c(64);
        shard_links(c, {.layout = layout, .reshard_after_forward = 2});
        const Tensor x = input_of(0, 64);
        const float expected = sum(by_hand(x)).item<float>();
        float seen = 0;
        for (int times = 0; times < 3; ++times) {
          if (world.rank() == trial % 4)
            for (int i = 0; i < 2000; ++i) sum(x);  // slow
          seen = sum(c(x)).item<float>();
        }
        const NoGrad guard;
        for (const nn::Parameter& p : c.parameters()) zero_(p.local().detach());
        expect(seen == expected, "rank {} saw {} for {}", world.rank(), seen, expected);
      }
    }));
}

TEST_CASE("gradients that were set to zero are zero, with all that was averaged before") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Chain by_hand, c;
    shard_links(c, {.layout = layout});
    nn::Sgd sgd(c.parameters());
    const auto loss = [](Chain& chain, int rank) { return sum(chain(input_of(rank))); };
    for (const bool again : {false, true}) {
      sgd.zero_grad();
      loss(c, world.rank()).backward();
      {
        const auto guard = shard::no_sync(c);
        loss(c, world.rank()).backward();
        sgd.zero_grad(nn::ZeroGrad::to_zero);
        if (again) loss(c, world.rank()).backward();
      }
      loss(c, world.rank()).backward();
      const Gradients expected = average_by_hand(by_hand, world.size(), [&](int rank) {
        for (int i = 0; i < (again ? 2 : 1); ++i) loss(by_hand, rank).backward();
      });
      expect_gradients(c, world, expected, "after zeros");
    }
  });
}

TEST_CASE("a backward that throws gives back what earlier ones kept without communication") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Chain by_hand, c;
    shard_links(c, {.layout = layout});
    const auto loss = [](Chain& chain, int rank) { return sum(chain(input_of(rank))); };
    const auto throws = [&](Chain& chain) {
      chain.between = [](const Tensor& y) {
        register_hook(y, [](const Tensor&) -> Tensor { throw Boom(); }).keep();
        return y;
      };
      bool thrown = false;
      try {
        loss(chain, world.rank()).backward();
      } catch (const Boom&) {
        thrown = true;
      }
      expect(thrown, "nothing was thrown");
      chain.between = nullptr;
    };
    {
      const auto guard = shard::no_sync(c);
      loss(c, world.rank()).backward();
      throws(c);
    }
    throws(c);
    loss(c, world.rank()).backward();
    const Gradients expected = average_by_hand(by_hand, world.size(), [&](int rank) {
      for (int i = 0; i < 2; ++i) loss(by_hand, rank).backward();
    });
    expect_gradients(c, world, expected, "two backwards, and two that threw");

    Chain replica;
    shard::DataParallel parallel(replica, world.group());
    {
      const auto guard = parallel.no_sync();
      loss(replica, world.rank()).backward();
    }
    throws(replica);
    loss(replica, world.rank()).backward();
    expect(difference(gradients(replica), expected).empty(), "data parallel: {}",
           difference(gradients(replica), expected));
  });
}

TEST_CASE("a backward within a backward is refused, and both models train on") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Chain a_by_hand, b_by_hand, a, b;
    for (Chain* c : {&a, &b}) shard_links(*c, {.layout = layout});
    const Tensor x = input_of(world.rank());
    a.between = [&](const Tensor& y) {
      register_hook(y, [&](const Tensor& g) {
        const GradMode on(true);
        sum(b(x)).backward();
        return g;
      }).keep();
      return y;
    };
    const std::string message = message_of<StateError>([&] { sum(a(x)).backward(); });
    expect(message.find("within another backward") != std::string::npos, "{}", message);
    a.between = nullptr;
    for (Chain* c : {&a, &b}) {
      c->zero_grad();
      sum((*c)(x)).backward();
    }
    const auto loss = [](Chain& chain, int rank) { return sum(chain(input_of(rank))); };
    expect_gradients(a, world, averages(a_by_hand, world, loss), "the outer model");
    expect_gradients(b, world, averages(b_by_hand, world, loss), "the inner model");
  });
}

TEST_CASE("a write of gathered parameters is refused by name") {
  on_ranks([](World&, shard::GroupLayout layout) {
    Chain c;
    shard_links(c, {.layout = layout, .strategy = shard::ShardingStrategy::shard_grad_op});
    sum(c(ones({2, 5})));
    for (const std::string& message : {message_of<StateError>([&] {
                                         const NoGrad guard;
                                         zero_(c.links[1].layer.weight.data());
                                       }),
                                       message_of<StateError>([&] {
                                         c.between = [&](const Tensor& y) {
                                           const NoGrad guard;
                                           zero_(c.links[1].layer.weight.data());
                                           return y;
                                         };
                                         shard::set_reshard_after_backward(c, true);
                                         c.links[0].used = true;
                                         const auto use = [&] {
                                           return add(c.links[1].layer.weight.tensor(), 0.0);
                                         };
                                         use();
                                         zero_(c.links[1].layer.weight.tensor().detach());
                                       })}) {
      expect(message.find("links.") != std::string::npos && message.find("weight") != std::string::npos, "{}",
             message);
    }
    c.between = nullptr;
    shard::reshard(c);
    sum(c(ones({2, 5}))).backward();
  });
}

TEST_CASE("what some ranks write is gathered anew by all, whatever is kept", "[threads meet]") {
  struct Case {
    shard::ReshardAfterForward after_forward;
    bool after_backward, root_alone;
  };
  const auto expect_all = [](World& world, shard::GroupLayout layout, const Case& kept) {
    Chain by_hand, c;
    const shard::Options options{.layout = layout, .reshard_after_forward = kept.after_forward};
    if (kept.root_alone)
      shard::fully_shard(c, options);
    else
      shard_links(c, options);
    shard::set_reshard_after_backward(c, kept.after_backward);
    const auto loss = [](Chain& chain, int rank) { return sum(chain(input_of(rank))); };
    for (int times = 0; times < 3; ++times) {
      c.zero_grad();
      loss(c, world.rank()).backward();
      const Gradients expected = averages(by_hand, world, loss);
      expect_gradients(c, world, expected, "a step by hand");
      // As users write it: ranks without a part have no gradient.
      const NoGrad guard;
      for (const nn::Parameter& p : c.parameters())
        if (p.grad().defined()) sub_(p.local(), mul(p.grad(), 0.1));
      const std::vector<nn::Parameter> whole = by_hand.parameters();
      for (std::size_t i = 0; i < whole.size(); ++i)
        sub_(whole[i].local(), mul(Tensor::from(expected[i], whole[i].shape()), 0.1));
    }
    // Between forwards without a backward, and by one rank alone.
    const NoGrad guard;
    const Tensor x = input_of(0);
    for (int times = 0; times < 3; ++times) {
      c(x);
      if (world.rank() == times % world.size())
        for (const nn::Parameter& p : c.parameters()) mul_(p.local(), 0.5);
      const Tensor y = c(x);
      Chain plain;
      plain.load_state_dict(shard::full_state_dict(c));
      expect(y.to_vector<float>() == plain(x).to_vector<float>(), "a write of one rank is not seen");
    }
  };
  on_ranks([&](World& world, shard::GroupLayout layout) {
    for (const bool after : {true, false})
      for (const bool after_backward : {true, false})
        for (const bool root_alone : {true, false})
          expect_all(world, layout, {after, after_backward, root_alone});
    if (world.size() % 2 == 0) expect_all(world, layout, {2, true, false});
  });
}

TEST_CASE("what some ranks write is gathered anew by all, also where it is read outside its module") {
  on_ranks_and_widths([](World& world, shard::GroupLayout layout, std::int64_t width) {
    Chain c(width), plain(width);
    shard_links(c, {.layout = layout});
    shard::set_reshard_after_backward(c, false);
    for (Chain* chain : {&c, &plain})
      chain->between = [chain](const Tensor& y) { return mul(y, sum(chain->links[2].layer.weight)); };
    for (int writer = 0; writer < world.size(); ++writer) {
      const Tensor x = input_of(0, width);
      sum(c(x)).backward();
      {
        const NoGrad guard;
        if (world.rank() == writer)
          for (const nn::Parameter& p : c.links[2].parameters()) mul_(p.local(), 0.5);
      }
      plain.load_state_dict(shard::full_state_dict(c));
      const Tensor y = c(x);
      expect(y.to_vector<float>() == plain(x).to_vector<float>(), "a write of rank {} is not seen", writer);
      sum(y).backward();
    }
  });
}

TEST_CASE("outputs of a sharded root are written in place like those of a plain model") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    manual_seed(2);
    nn::Sequential by_hand(nn::Linear(5, 4), nn::Linear(4, 3));
    nn::Sequential c = by_hand.clone();
    shard::fully_shard(c[0], {.layout = layout});
    shard::fully_shard(c, {.layout = layout});
    const auto loss = [](nn::Sequential& s, int rank) {
      const Tensor y = s(input_of(rank));
      mul_(y, 0.5);
      return sum(square(y));
    };
    loss(c, world.rank()).backward();
    expect_gradients(
        c, world, average_by_hand(by_hand, world.size(), [&](int rank) { loss(by_hand, rank).backward(); }),
        "written in place");
  });
}

TEST_CASE("an interception may make calls of its own after the one it passes on") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Chain by_hand, c;
    shard_links(c, {.layout = layout});
    const Interception also([&](const ObservedCall& call, const Interception::Proceed& proceed) {
      proceed(call.collective);
      if (call.collective.channel != 5) world.group().barrier({.channel = 5});
    });
    const auto loss = [](Chain& chain, int rank) { return sum(chain(input_of(rank))); };
    loss(c, world.rank()).backward();
    const Tensor all = zeros({world.size()}), mine = full({1}, world.rank() + 1);
    Work work = world.group().enqueue(
        {.kind = CollectiveKind::all_gather, .inputs = {mine}, .outputs = {all}, .channel = 1});
    work.wait();
    for (int r = 0; r < world.size(); ++r)
      expect(all.to_vector<float>()[static_cast<std::size_t>(r)] == static_cast<float>(r + 1), "not there");
    expect_gradients(c, world, averages(by_hand, world, loss), "with calls beside");
  });
}

TEST_CASE("what was kept without communication goes along to another dtype") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Chain by_hand, c;
    shard_links(c, {.layout = layout});
    const auto backward = [](Chain& chain, int rank) {
      sum(chain(to(input_of(rank), chain.parameters()[0].local().dtype()))).backward();
    };
    backward(c, world.rank());
    {
      const auto guard = shard::no_sync(c);
      backward(c, world.rank());
    }
    c.to(f64);
    backward(c, world.rank());
    for (const nn::Parameter& p : c.parameters())
      if (p.grad().defined()) expect(p.grad().shape() == p.local().shape(), "shape {}", p.grad().shape());
    const Gradients once =
        averages(by_hand, world, [](Chain& chain, int rank) { return sum(chain(input_of(rank))); });
    const Gradients found = whole_gradients(c, world.group());
    for (std::size_t p = 0; p < once.size(); ++p)
      for (std::size_t i = 0; i < once[p].size(); ++i)
        expect(std::abs(found[p][i] - 3 * once[p][i]) < 1e-4F, "{} for three times {}", found[p][i],
               once[p][i]);
  });
}

TEST_CASE("a hook after accumulation sees the gradient that was averaged") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Chain c;
    int before = 0, after = 0;
    const auto count = [](int& calls) {
      return [&calls](Leaf& leaf) {
        expect(leaf.grad.defined(), "no gradient yet");
        ++calls;
      };
    };
    const Subscription first = register_post_accumulate_hook(c.links[1].layer.weight.tensor(), count(before));
    shard_links(c, {.layout = layout});
    const Subscription second = register_post_accumulate_hook(c.links[1].layer.weight.tensor(), count(after));
    const bool has = c.links[1].layer.weight.local().numel() > 0 || layout != shard::GroupLayout::flat;
    for (const int times : {1, 2}) {
      sum(c(input_of(world.rank()))).backward();
      expect(before == (has ? times : 0) && after == before, "{} and {} calls", before, after);
    }
    const auto guard = shard::no_sync(c);
    sum(c(input_of(world.rank()))).backward();
    expect(after == (has ? 3 : 1), "without communication: {} calls", after);
  });
}

TEST_CASE("frozen modules are gathered for a backward on all ranks or, where all say so, on none") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const auto frozen : {shard::BackwardGather::yes, shard::BackwardGather::no})
      for (const bool one_wants_grad : {false, true}) {
        if (one_wants_grad && frozen == shard::BackwardGather::no) continue;  // refused, below
        Chain by_hand(5, 4), c(5, 4);
        for (Chain* chain : {&by_hand, &c})
          for (const std::size_t i : {0, 1}) chain->links[i].set_requires_grad(false);
        for (const std::size_t i : {0, 1})
          shard::fully_shard(c.links[i], {.layout = layout, .backward_gather = frozen});
        for (std::size_t i = 2; i < c.links.size(); ++i) shard::fully_shard(c.links[i], {.layout = layout});
        shard::fully_shard(c, {.layout = layout});
        Tensor input = input_of(world.rank());
        input.requires_grad_(one_wants_grad && world.rank() == 0);
        const auto loss = [](Chain& chain, int rank) { return sum(chain(input_of(rank))); };
        for (int times = 0; times < 2; ++times) {
          c.zero_grad();
          const Tensor y = sum(c(input));
          const auto gathers = gathers_of([&] { y.backward(); });
          const std::size_t due = frozen == shard::BackwardGather::yes ? 4 : 2;
          expect(gathers.size() == due, "{} gathers where {} are due", gathers.size(), due);
          expect_gradients(c, world, averages(by_hand, world, loss), "with a frozen trunk");
        }
      }
  });
}

TEST_CASE(
    "a backward that comes to what it is not to gather is refused on every rank, and the next one works") {
  on_ranks([](World&, shard::GroupLayout layout) {
    Chain c(5, 4);
    shard::fully_shard(c.links[0], {.layout = layout, .backward_gather = shard::BackwardGather::no});
    for (std::size_t i = 1; i < c.links.size(); ++i) shard::fully_shard(c.links[i], {.layout = layout});
    shard::fully_shard(c, {.layout = layout});
    const auto refused = [&](const Tensor& x, std::string_view why) {
      std::string line;
      try {
        sum(c(x)).backward();
      } catch (const StateError& e) {
        line = e.what();
      }
      expect(line.find(why) != line.npos, "refused by: {}", line);
    };
    Tensor x = ones({2, 5});
    refused(x, "is trained, and was sharded with BackwardGather::no");
    c.links[0].set_requires_grad(false);
    x.requires_grad_();
    refused(x, "it comes to");
    sum(c(x.detach())).backward();
    expect(c.links[1].layer.weight.grad().defined(), "what is above is trained");
  });
}

TEST_CASE("values that nn::init draws for a sharded parameter are those of an unsharded one") {
  on_ranks([](World&, shard::GroupLayout layout) {
    nn::Linear by_hand(6, 5), c(6, 5);
    shard::fully_shard(c, {.layout = layout});
    const auto draw = [](nn::Linear& m) {
      manual_seed(11);
      nn::init::normal_(m.weight.object(), 0, 2);
      nn::init::uniform_(m.bias.object(), -1, 1);
      nn::init::xavier_uniform_(m.weight.object());
    };
    const auto values = [](const nn::StateDict& state) {
      std::vector<std::vector<float>> all;
      for (const auto& [name, value] : state) all.push_back(value.to_vector<float>());
      return all;
    };
    using Fill = void (*)(const nn::Parameter&);
    for (const Fill fill : {Fill([](const nn::Parameter& p) { nn::init::xavier_normal_(p); }),
                            Fill([](const nn::Parameter& p) { nn::init::kaiming_normal_(p); }),
                            Fill([](const nn::Parameter& p) { nn::init::kaiming_uniform_(p); }),
                            Fill([](const nn::Parameter& p) { nn::init::trunc_normal_(p); }),
                            Fill([](const nn::Parameter& p) { nn::init::orthogonal_(p); })}) {
      manual_seed(13);
      fill(by_hand.weight);
      manual_seed(13);
      fill(c.weight);
      expect(values(shard::full_state_dict(c))[0] == values(by_hand.state_dict())[0], "other values");
    }
    expect(to_string(c) == to_string(by_hand), "{}", to_string(c));
    draw(by_hand);
    draw(c);
    expect(values(shard::full_state_dict(c)) == values(by_hand.state_dict()), "other values");
  });
}

TEST_CASE("an optimizer made before the parameters became one flat parameter says so") {
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    Chain c;
    nn::Adam adam(c.parameters());
    const shard::FullyShardedDataParallel handle(c);
    sum(c(ones({2, 5}))).backward();
    const std::string message = message_of<StateError>([&] { adam.step(); });
    expect(message.find("FullyShardedDataParallel") != std::string::npos, "{}", message);
  }));
}

namespace {

/// Lets one rank stand still until another says so, whatever the clock says.
class Gate {
 public:
  void open() {
    open_ = true;
    open_.notify_all();
  }
  void pass() const { open_.wait(false); }

 private:
  std::atomic<bool> open_ = false;
};

struct AfterForward final : nn::ModuleObserver {
  std::function<void()> act;
  void after_forward(nn::Module&, std::span<Tensor* const>) override { act(); }
};

}  // namespace

TEST_CASE("neither freeing nor an exception waits for a rank that stands still", "[threads meet]") {
  for (const std::int64_t width : widths)
    for (const bool throws : {false, true}) {
      Gate gate;
      const auto body = [&](World& world) {
        Chain c(width);
        shard_links(c, {.mixed_precision = {.param_dtype = bf16}});
        const NoGrad guard;
        const Tensor x = input_of(0, width);
        c(x);  // from here on a forward gathers ahead
        c.between = [&](const Tensor& y) -> Tensor {
          if (world.rank() == 2) gate.pass();
          if (world.rank() == 1 && throws) throw Boom();
          return y;
        };
        AfterForward open;
        open.act = [&] {
          if (world.rank() == 0) gate.open();
        };
        const Subscription subscription = c.links[1].observe(open);
        try {
          c(x);
        } catch (const CollectiveError&) {
          gate.open();
          throw;
        }
      };
      if (throws)
        CHECK_THROWS_AS(run_ranks(3, body), Boom);
      else
        CHECK_NOTHROW(run_ranks(3, body));
    }
}

TEST_CASE("data parallel refuses parameters that are not those it was made with") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    const Tensor x = input_of(world.rank());
    Chain frozen, replaced, cast;
    frozen.links[0].set_requires_grad(false);
    const shard::DataParallel of_frozen(frozen, world.group()), of_replaced(replaced, world.group()),
        of_cast(cast, world.group());
    for (Chain* c : {&frozen, &replaced, &cast}) sum((*c)(x)).backward();
    frozen.links[0].set_requires_grad(true);
    replaced.links[1].layer.weight = nn::Parameter(ones({5, 5}));
    cast.to(f64);
    const auto refused = [&](Chain& c, const Tensor& input) {
      const std::string message = message_of<StateError>([&] { c(input); });
      expect(message.find("make it anew") != std::string::npos, "{}", message);
    };
    refused(frozen, x);
    refused(cast, to(x, f64));
    const Tensor loss = sum(replaced(x));
    const std::string message = message_of<StateError>([&] { loss.backward(); });
    expect(message.find("make it anew") != std::string::npos, "{}", message);
    for (Link& link : replaced.links)
      for (nn::Param* p : {&link.layer.weight, &link.layer.bias}) *p = nn::Parameter(ones(p->shape()));
    const Tensor of_others = sum(replaced(x));  // of no parameter that is averaged
    const std::string again = message_of<StateError>([&] { of_others.backward(); });
    expect(again.find("make it anew") != std::string::npos, "{}", again);
    frozen.links[0].set_requires_grad(false);
    sum(frozen(x)).backward();
  }));
}

TEST_CASE("a shard is written when all peers have read it, however late they do", "[threads meet]") {
  for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
    for (const std::int64_t width : widths) {
      std::atomic<bool> written = false;
      CHECK_NOTHROW(run_ranks(3, [&](World& world) {
        Chain by_hand(width, 2), c(width, 2);
        shard_links(c, {.layout = layout});
        const NoGrad guard;
        const Tensor x = input_of(0, width), expected = by_hand(x);
        // The others need no more than this rank's post; it reads theirs when one has written, or waits for
        // it.
        bool late = false;
        const Interception reads_late([&](const ObservedCall& call, const Interception::Proceed& proceed) {
          proceed(call.collective);
          late = late || call.collective.label == "links.1";
          const bool waits = world.rank() == 2 && call.collective.label == "links.1";
          for (int looks = 0; waits && looks < 200'000 && !written; ++looks) std::this_thread::yield();
        });
        const Tensor y = c(x);
        expect(late, "nothing was posted");
        for (const nn::Parameter& p : c.parameters()) zero_(p.local().detach());
        written = true;
        expect(y.to_vector<float>() == expected.to_vector<float>(), "rank {} read what came later",
               world.rank());
      }));
    }
}

namespace {

struct Weight final : nn::Layer<Weight> {
  nn::Param w;
  explicit Weight(std::int64_t width) : w(ones({width, width})) {}
  Tensor forward(const Tensor& x) const { return mul(w, x); }
  void visit(auto&& on) { on("w", w); }
};

}  // namespace

TEST_CASE("what one rank reads in grad() decides for no rank what is gathered next") {
  on_ranks_and_widths([](World& world, shard::GroupLayout layout, std::int64_t width) {
    Weight net(width);
    shard::fully_shard(net, {.layout = layout});
    const Tensor x = ones({width, width}).requires_grad_();
    net(x);
    shard::reshard(net);
    const Tensor read = mul(net.w.tensor(), x);
    const Tensor loss = world.rank() == 0 ? sum(read) : sum(mul(x, 2.0));
    const Tensor g = grad(std::span(&loss, 1), std::span(&x, 1))[0];
    expect(g.to_vector<float>()[0] == (world.rank() == 0 ? 1 : 2), "{}", g.to_vector<float>()[0]);
    mul(net.w.tensor(), x);
    world.group().barrier({.label = "all come here"});
  });
}

TEST_CASE("all groups of a mesh are renewed at once, and the model trains on", "[threads meet]") {
  for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
    for (int culprit = 0; culprit < 4; ++culprit) {
      INFO("rank " << culprit);
      CHECK_NOTHROW(run_ranks(4, [&](World& world) {
        const DeviceMesh mesh = world.mesh({2, 2}, {"replica", "shard"});
        Chain c;
        shard_links(c, {.mesh = mesh, .layout = layout});
        const auto loss = [](Chain& chain, int rank) { return sum(chain(input_of(rank))); };
        bool heard = false;
        c.between = [&](const Tensor& y) {
          register_hook(y, [&](const Tensor& g) -> Tensor {
            if (world.rank() == culprit) throw Boom();
            return g;
          }).keep();
          return y;
        };
        try {
          for (;;) loss(c, world.rank()).backward();
        } catch (const Boom&) {
          heard = true;
        } catch (const CollectiveError&) {
          heard = true;
        }
        expect(heard, "rank {} heard nothing", world.rank());
        c.between = nullptr;
        mesh.renew();
        for (int times = 0; times < 2; ++times) {
          c.zero_grad();
          loss(c, world.rank()).backward();
          Chain fresh;
          shard_links(fresh, {.mesh = mesh, .layout = layout});
          loss(fresh, world.rank()).backward();
          const std::string found = difference(gradients(c), gradients(fresh));
          expect(found.empty(), "after a renewal: {}", found);
        }
      }));
    }
}
