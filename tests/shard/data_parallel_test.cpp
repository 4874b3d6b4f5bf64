// Replicas: their gradients are the average by hand, to the bit, whatever each rank uses.
#include <sherd.h>

#include <array>

#include "tests/catch.h"
#include "tests/ranks.h"

using namespace sherd;
using sherd::test::expect;

namespace {

struct Net final : nn::Layer<Net> {
  nn::Linear first{5, 7}, second{7, 3}, extra{5, 3};
  Tensor forward(const Tensor& x, bool with_extra) {
    const Tensor y = second(relu(first(x)));
    return with_extra ? add(y, extra(x)) : y;
  }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
    on("extra", extra);
  }
};

constexpr std::array worlds = {1, 2, 3, 4};

Tensor data_of(int rank, int step) {
  manual_seed(static_cast<std::uint64_t>(100 * step + rank));
  return randn({4, 5});
}

using Gradients = std::vector<std::vector<float>>;  // empty: none

Gradients gradients(const nn::Module& module) {
  Gradients all;
  for (const nn::Parameter& p : module.parameters())
    all.push_back(p.grad().defined() ? p.grad().to_vector<float>() : std::vector<float>{});
  return all;
}

/// Each rank's own gradients of the same weights, and their average: in rank order, in f32, one division. A
/// parameter that no rank has a gradient for has none.
Gradients average_by_hand(Net& net, int ranks, int step, const std::function<bool(int)>& uses_extra) {
  std::vector<Gradients> each;
  for (int rank = 0; rank < ranks; ++rank) {
    net.zero_grad();
    sum(net(data_of(rank, step), uses_extra(rank))).backward();
    each.push_back(gradients(net));
  }
  net.zero_grad();
  Gradients average(each[0].size());
  for (std::size_t p = 0; p < average.size(); ++p) {
    std::size_t numel = 0;
    for (const Gradients& g : each) numel = std::max(numel, g[p].size());
    for (std::size_t i = 0; i < numel; ++i) {
      float total = each[0][p].empty() ? 0 : each[0][p][i];
      for (int rank = 1; rank < ranks; ++rank) {
        const std::vector<float>& g = each[static_cast<std::size_t>(rank)][p];
        total += g.empty() ? 0 : g[i];
      }
      average[p].push_back(total / static_cast<float>(ranks));
    }
  }
  return average;
}

Gradients plus(const Gradients& a, const Gradients& b) {
  Gradients sum = a;
  for (std::size_t p = 0; p < sum.size(); ++p)
    for (std::size_t i = 0; i < sum[p].size(); ++i) sum[p][i] += b[p][i];
  return sum;
}

/// A net whose weights differ from rank to rank until they are shared.
Net net_of(int rank) {
  manual_seed(static_cast<std::uint64_t>(rank) + 1);
  return {};
}

}  // namespace

TEST_CASE("construction gives every rank the first one's values") {
  for (int ranks : worlds)
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      Net net = net_of(world.rank()), first = net_of(0);
      const shard::DataParallel replicas(net, world.group());
      for (std::size_t p = 0; p < net.parameters().size(); ++p)
        expect(
            net.parameters()[p].data().to_vector<float>() == first.parameters()[p].data().to_vector<float>(),
            "parameter {}", p);
    }));
}

TEST_CASE("gradients are the average by hand, to the bit, in buckets of any size") {
  for (int ranks : worlds)
    for (std::int64_t bucket_bytes : {1, 100, 1 << 20})
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Net net = net_of(0);
        const Gradients by_hand = average_by_hand(net, ranks, 0, [](int) { return true; });
        const shard::DataParallel replicas(net, world.group(), {.bucket_bytes = bucket_bytes});
        sum(net(data_of(world.rank(), 0), true)).backward();
        expect(gradients(net) == by_hand, "ranks {}, buckets of {} bytes", ranks, bucket_bytes);
      }));
}

TEST_CASE("a parameter that some ranks use gets their part, one that none uses gets none") {
  for (int ranks : worlds)
    for (int users = 0; users <= ranks; ++users)
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        const auto uses = [&](int rank) { return rank >= ranks - users; };
        Net net = net_of(0);
        const Gradients by_hand = average_by_hand(net, ranks, 0, uses);
        const shard::DataParallel replicas(net, world.group());
        sum(net(data_of(world.rank(), 0), uses(world.rank()))).backward();
        expect(gradients(net) == by_hand, "{} of {} ranks use it", users, ranks);
        expect(net.extra.weight.grad().defined() == (users > 0), "presence with {} users", users);
      }));
}

TEST_CASE("averages add to what earlier backwards left") {
  for (int ranks : worlds)
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      const auto always = [](int) { return true; };
      Net net = net_of(0);
      const Gradients one = average_by_hand(net, ranks, 0, always),
                      two = average_by_hand(net, ranks, 1, always);
      const shard::DataParallel replicas(net, world.group());
      for (int step : {0, 1}) sum(net(data_of(world.rank(), step), true)).backward();
      expect(gradients(net) == plus(one, two), "ranks {}", ranks);
    }));
}

TEST_CASE("without communication ranks keep their own gradients until the next average") {
  for (int ranks : worlds)
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      Net net = net_of(0), alone = net_of(0);
      shard::DataParallel replicas(net, world.group());
      const std::uint64_t calls = collective_calls();
      for (int step : {0, 1}) {
        const auto guard = replicas.no_sync();
        sum(net(data_of(world.rank(), step), true)).backward();
        sum(alone(data_of(world.rank(), step), true)).backward();
      }
      expect(collective_calls() == calls, "a backward communicated");
      expect(gradients(net) == gradients(alone), "the sum of this rank's own");

      sum(net(data_of(world.rank(), 2), false)).backward();
      sum(alone(data_of(world.rank(), 2), false)).backward();
      for (std::size_t p = 0; p < net.parameters().size(); ++p) {
        Tensor average = clone(alone.parameters()[p].grad());
        world.group().all_reduce(average, ReduceOp::average());
        expect(net.parameters()[p].grad().to_vector<float>() == average.to_vector<float>(), "parameter {}",
               p);
      }
    }));
}

TEST_CASE("a backward that throws on every rank leaves a model that trains") {
  CHECK_NOTHROW(run_ranks(2, [&](World& world) {
    Net net = net_of(0);
    const Gradients by_hand = average_by_hand(net, 2, 1, [](int) { return true; });
    shard::DataParallel replicas(net, world.group(), {.bucket_bytes = 1});
    {
      Tensor x = data_of(world.rank(), 0).requires_grad_();
      const Subscription hook =
          register_hook(x, [](const Tensor&) -> Tensor { throw std::runtime_error("boom"); });
      try {
        sum(net(x, true)).backward();
        expect(false, "nothing was thrown");
      } catch (const std::runtime_error& error) {
        expect(std::string_view(error.what()) == "boom", "{}", error.what());
      }
    }
    net.zero_grad();
    sum(net(data_of(world.rank(), 1), true)).backward();
    expect(gradients(net) == by_hand, "after the exception");
  }));
}

TEST_CASE("ranks train alike, and as their data in one batch would") {
  const auto train = [](int ranks, int rank, const std::function<void(Net&)>& wrap) {
    Net net = net_of(0);
    wrap(net);
    nn::Sgd optimizer(net.parameters(), {.lr = 0.05});
    for (int step = 0; step < 5; ++step) {
      Tensor loss;
      for (int r = 0; r < ranks; ++r) {
        if (rank >= 0 && r != rank) continue;
        const Tensor part = mean(square(net(data_of(r, step), true)));
        loss = loss.defined() ? add(loss, part) : part;
      }
      (rank >= 0 ? loss : div(loss, ranks)).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    return net.second.weight.data().to_vector<float>();
  };
  for (int ranks : worlds) {
    const std::vector<float> whole = train(ranks, -1, [](Net&) {});
    std::vector<std::vector<float>> weights(static_cast<std::size_t>(ranks));
    run_ranks(ranks, [&](World& world) {
      std::optional<shard::DataParallel> replicas;
      weights[static_cast<std::size_t>(world.rank())] =
          train(ranks, world.rank(), [&](Net& net) { replicas.emplace(net, world.group()); });
      replicas.reset();
    });
    for (const std::vector<float>& w : weights) {
      CHECK(w == weights[0]);
      for (std::size_t i = 0; i < w.size(); ++i) CHECK(w[i] == Approx(whole[i]).margin(1e-6));
    }
  }
}

TEST_CASE("data parallel refuses what it cannot do") {
  run_ranks(1, [&](World& world) {
    Net net;
    try {
      const shard::DataParallel replicas(net, world.group(), {.bucket_bytes = 0});
      expect(false, "nothing was thrown");
    } catch (const ValueError&) {
    }
  });
  SUCCEED();
}
