// Replicas: their gradients are the average by hand, to the bit, whatever each rank uses; what takes over,
// ends, or stands in each other's way; and whose buffers they have.
#include <sherd.h>

#include <array>

#include "tests/catch.h"
#include "tests/ranks.h"

using namespace sherd;
using sherd::test::expect;
using sherd::test::message_of;

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

struct Normed final : nn::Layer<Normed> {
  nn::Linear first{5, 7}, second{7, 3};
  nn::BatchNorm1d norm{7};
  Tensor forward(const Tensor& x) { return second(norm(first(x))); }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
    on("norm", norm);
    on("again", norm);  // as a module that two others share: its buffers have two names
  }
};

struct Masked final : nn::Layer<Masked> {
  nn::Linear linear{5, 3};
  nn::Buffer mask{full({3}, 2)};
  Tensor forward(const Tensor& x) { return mul(linear(x), mask); }
  void visit(auto&& on) {
    on("linear", linear);
    on("mask", mask);
  }
};

struct Deep final : nn::Layer<Deep> {
  nn::ModuleList<nn::Linear> layers;
  Deep() {
    for (int i = 0; i < 12; ++i) layers.emplace_back(5, 5);
  }
  /// Before layer `at` the ranks call each other; in a backward, after it.
  Tensor forward(const Tensor& x, const Group& group, std::size_t at) {
    Tensor y = x;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      if (i == at) y = enter_parallel(group, y);
      y = tanh(layers[i](y));
    }
    return y;
  }
  void visit(auto&& on) { on("layers", layers); }
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

using Values = std::vector<std::vector<double>>;

Values buffers(const nn::Module& module) {
  Values all;
  for (const nn::NamedBuffer& b : module.named_buffers())
    all.push_back(to(b.tensor, f64).to_vector<double>());
  return all;
}

Values parameters(const nn::Module& module) {
  Values all;
  for (const nn::Parameter& p : module.parameters()) all.push_back(to(p.data(), f64).to_vector<double>());
  return all;
}

/// The message of the StateError that `call` throws has all of `words`.
template <class F>
void expect_refusal(F&& call, std::initializer_list<std::string_view> words) {
  const std::string message = message_of<StateError>(call);
  for (std::string_view word : words)
    expect(message.find(word) != std::string::npos, "no '{}' in: {}", word, message);
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

TEST_CASE("a sharded parameter is no replica's, and the refusal changes nothing") {
  enum class Way { flat, per_parameter, handle, a_part, frozen };
  const auto cut = [](Net& net, Way way) {
    if (way == Way::frozen) net.set_requires_grad(false);
    if (way == Way::handle)
      const shard::FullyShardedDataParallel handle(net);
    else
      shard::fully_shard(
          way == Way::a_part ? static_cast<nn::Module&>(net.extra) : net,
          {.layout = way == Way::flat ? shard::GroupLayout::flat : shard::GroupLayout::per_parameter});
  };
  for (int ranks : worlds)
    for (Way way : {Way::flat, Way::per_parameter, Way::handle, Way::a_part, Way::frozen})
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Net net = net_of(0), twin = net_of(0);
        for (Net* each : {&net, &twin}) cut(*each, way);
        const std::string_view name = way == Way::handle   ? "'_flat_param'"
                                      : way == Way::a_part ? "'extra.weight'"
                                                           : "'first.weight'";
        expect_refusal([&] { static_cast<void>(shard::DataParallel(net, world.group())); },
                       {name, "sharded", "fully_shard"});
        std::vector<std::vector<float>> after;
        for (Net* each : {&net, &twin}) {
          if (way != Way::frozen) sum((*each)(data_of(world.rank(), 0), true)).backward();
          nn::Sgd(each->parameters(), {.lr = 0.1}).step();
          for (const auto& [key, value] : shard::full_state_dict(*each))
            after.push_back(value.to_vector<float>());
        }
        for (std::size_t i = 0; i < after.size() / 2; ++i)
          expect(after[i] == after[i + after.size() / 2], "parameter {}", i);
      }));
}

TEST_CASE("a module is a replica or sharded, not both at once, but one after the other") {
  for (int ranks : worlds)
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      Net both = net_of(0), net = net_of(0);
      const Gradients by_hand = average_by_hand(net, ranks, 0, [](int) { return true; });
      const shard::DataParallel living(both, world.group());
      const std::string message = message_of<StateError>([&] {
        shard::fully_shard(both);
        both(data_of(world.rank(), 0), true);
      });
      expect(message.find("'extra.bias'") != std::string::npos ||
                 message.find("'first.weight'") != std::string::npos,
             "names a parameter: {}", message);
      expect(message.find("make it anew") == std::string::npos, "sends the user in circles: {}", message);

      {
        const shard::DataParallel ended(net, world.group());
      }
      shard::fully_shard(net);
      sum(net(data_of(world.rank(), 0), true)).backward();
      for (std::size_t p = 0; p < by_hand.size(); ++p) {
        const nn::Parameter parameter = net.parameters()[p];
        const Tensor average = Tensor::from(by_hand[p], parameter.shape());
        expect(parameter.grad().to_vector<float>() == shard::part_of(parameter, average).to_vector<float>(),
               "parameter {}", p);
      }
    }));
}

TEST_CASE("a parameter whose gradient goes to a sink of another kind is no replica's") {
  struct Other final : GradSink {
    void accept(PassInfo, Leaf&, Tensor) override {}
  };
  CHECK_NOTHROW(run_ranks(2, [&](World& world) {
    Net net = net_of(0);
    set_sink(net.second.bias.tensor(), std::make_shared<Other>());
    expect_refusal([&] { static_cast<void>(shard::DataParallel(net, world.group())); },
                   {"'second.bias'", "set_sink"});
    set_sink(net.second.bias.tensor(), nullptr);
    const shard::DataParallel replicas(net, world.group());
  }));
}

TEST_CASE("an object that takes another's place averages as that did") {
  enum class Place { before_the_other_ends, after_it_ended, beside_it };
  for (int ranks : worlds)
    for (Place place : {Place::before_the_other_ends, Place::after_it_ended, Place::beside_it})
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Net net = net_of(0);
        const auto always = [](int) { return true; };
        const Gradients one = average_by_hand(net, ranks, 0, always),
                        both = average_by_hand(net, ranks, 1, always);
        const auto make = [&] { return std::make_unique<shard::DataParallel>(net, world.group()); };
        auto first = make();
        if (place == Place::after_it_ended) first.reset();
        auto second = make();
        if (place == Place::before_the_other_ends) first.reset();
        sum(net(data_of(world.rank(), 0), true)).backward();
        expect(gradients(net) == one, "the average");
        net.zero_grad();
        {
          const auto guard = second->no_sync();
          const std::uint64_t calls = collective_calls();
          sum(net(data_of(world.rank(), 0), true)).backward();
          expect(collective_calls() == calls, "no_sync of the one in charge");
        }
        if (first) {
          expect_refusal([&] { const auto guard = first->no_sync(); }, {"made later"});
          second.reset();
          expect_refusal([&] { net(data_of(world.rank(), 0), true); },
                         {"'extra.bias'", "make this one anew"});
          return;
        }
        net.zero_grad();
        sum(net(data_of(world.rank(), 1), true)).backward();
        expect(gradients(net) == both, "and the next");
      }));
}

TEST_CASE("gradients that are there when the object is made count as this rank's own") {
  for (int ranks : worlds)
    for (bool replaced : {false, true})
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Net net = net_of(0), alone = net_of(0);
        auto replicas = std::make_unique<shard::DataParallel>(net, world.group());
        if (!replaced) replicas.reset();
        {
          std::optional<shard::DataParallel::NoSync> guard;
          if (replaced) guard.emplace(*replicas);
          sum(net(data_of(world.rank(), 0), true)).backward();
        }
        replicas = std::make_unique<shard::DataParallel>(net, world.group());
        sum(net(data_of(world.rank(), 1), false)).backward();
        sum(alone(data_of(world.rank(), 0), true)).backward();
        sum(alone(data_of(world.rank(), 1), false)).backward();
        for (std::size_t p = 0; p < net.parameters().size(); ++p) {
          Tensor average = clone(alone.parameters()[p].grad());
          world.group().all_reduce(average, ReduceOp::average());
          expect(net.parameters()[p].grad().to_vector<float>() == average.to_vector<float>(), "parameter {}",
                 p);
        }
      }));
}

TEST_CASE("after the object's end every rank trains alone, whatever was frozen then") {
  for (int ranks : worlds)
    for (bool frozen : {false, true})
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Net net = net_of(0), alone = net_of(0);
        {
          const shard::DataParallel replicas(net, world.group());
          if (frozen) net.first.set_requires_grad(false);
        }
        net.set_requires_grad(true);
        const std::uint64_t calls = collective_calls();
        for (Net* each : {&net, &alone}) sum((*each)(data_of(world.rank(), 0), true)).backward();
        expect(collective_calls() == calls, "a backward communicated");
        expect(gradients(net) == gradients(alone), "this rank's own");
      }));
}

TEST_CASE("a backward that is refused within another leaves both whole") {
  enum class From { first_gradient, last_gradient, input };
  for (int ranks : worlds)
    for (From from : {From::first_gradient, From::last_gradient, From::input})
      for (std::int64_t bucket_bytes : {1, 1 << 20})
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          Net net = net_of(0);
          const Gradients without = average_by_hand(net, ranks, 0, [](int) { return false; }),
                          with = average_by_hand(net, ranks, 0, [](int) { return true; });
          const shard::DataParallel replicas(net, world.group(), {.bucket_bytes = bucket_bytes});
          Tensor x = data_of(world.rank(), 0).requires_grad_();
          const Tensor inner = sum(net.extra(x.detach())), outer = sum(net(x, false));
          int refusals = 0;
          const Subscription hook = register_hook(from == From::first_gradient  ? net.second.bias.tensor()
                                                  : from == From::last_gradient ? net.first.weight.tensor()
                                                                                : x,
                                                  [&](const Tensor&) {
                                                    expect_refusal([&] { inner.backward(); }, {"grad()"});
                                                    ++refusals;
                                                    return Tensor{};
                                                  });
          outer.backward();
          expect(refusals == 1, "{} refusals", refusals);
          expect(gradients(net) == without, "the outer one's average");
          inner.backward();
          expect(gradients(net) == with, "the inner one's, afterwards");
        }));
}

TEST_CASE("ranks may call each other anywhere in the graph, with buckets of any size") {
  for (int ranks : {2, 3, 4}) {
    std::vector<Gradients> results;
    for (std::int64_t bucket_bytes : {1 << 20, 100, 1}) {
      std::vector<Gradients> each(static_cast<std::size_t>(ranks));
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        manual_seed(0);
        Deep net;
        const shard::DataParallel replicas(net, world.group(), {.bucket_bytes = bucket_bytes});
        const std::size_t at = world.rank() == 0 ? 0 : net.layers.size() - 1;
        sum(net(data_of(world.rank(), 0).requires_grad_(), world.group(), at)).backward();
        each[static_cast<std::size_t>(world.rank())] = gradients(net);
      }));
      for (const Gradients& g : each) results.push_back(g);
    }
    for (const Gradients& g : results) CHECK(g == results[0]);
  }
}

TEST_CASE("a captured step repeats the averages, and whose buffers ranks have") {
  for (int ranks : worlds)
    for (std::int64_t bucket_bytes : {1, 1 << 20})
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        manual_seed(0);
        Normed eager, captured = eager.clone();
        const shard::DataParallel a(eager, world.group(), {.bucket_bytes = bucket_bytes}),
            b(captured, world.group(), {.bucket_bytes = bucket_bytes});
        const auto step_of = [](Normed& net) {
          return [&net, optimizer = std::make_shared<nn::Sgd>(net.parameters(), nn::SgdOptions{.lr = 0.1})](
                     std::span<const Tensor> in) -> std::vector<Tensor> {
            const Tensor loss = mean(square(net(in[0])));
            loss.backward();
            optimizer->step();
            optimizer->zero_grad();
            return {loss.detach()};
          };
        };
        const Step one = step_of(eager), two = step_of(captured);
        Program program = capture(two, {data_of(world.rank(), 0)});
        one(std::vector{data_of(world.rank(), 0)});
        for (int step : {1, 2, 3}) {
          const Tensor loss = one(std::vector{data_of(world.rank(), step)})[0];
          const Tensor replayed = program.replay({data_of(world.rank(), step)})[0];
          expect(loss.item() == replayed.item(), "loss of step {}", step);
          expect(parameters(captured) == parameters(eager), "parameters after step {}", step);
          expect(buffers(captured) == buffers(eager), "buffers after step {}", step);
        }
      }));
}

TEST_CASE("a step of several ranks that leaves out a parameter is not captured, and goes on") {
  for (int ranks : worlds)
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      Net net = net_of(0);
      const Gradients by_hand = average_by_hand(net, ranks, 0, [](int) { return false; });
      const shard::DataParallel replicas(net, world.group());
      const Step step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
        const Tensor loss = sum(net(in[0], false));
        loss.backward();
        net.zero_grad();
        return {loss.detach()};
      };
      const auto captured = [&] { capture(step, {data_of(world.rank(), 0)}); };
      if (ranks == 1)
        captured();
      else
        expect_refusal(captured, {"capture", "the host reads"});
      sum(net(data_of(world.rank(), 0), false)).backward();
      expect(gradients(net) == by_hand, "afterwards");
    }));
}

TEST_CASE("ranks have rank 0's buffers after every backward that averages, unless each keeps its own") {
  using shard::BroadcastBuffers;
  for (int ranks : worlds)
    for (BroadcastBuffers option : {BroadcastBuffers::yes, BroadcastBuffers::no})
      for (bool by_parts : {false, true})  // its layers, without its own forward
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          manual_seed(0);
          Normed net, of_first = net.clone(), own = net.clone();
          shard::DataParallel replicas(net, world.group(), {.broadcast_buffers = option});
          const auto forward = [&](int step) {
            const std::uint64_t calls = collective_calls();
            const Tensor x = data_of(world.rank(), step);
            const Tensor y = by_parts ? net.second(net.norm(net.first(x))) : net(x);
            expect(collective_calls() == calls, "a forward communicated");
            of_first(data_of(0, step));
            own(x);
            return sum(y);
          };
          const bool first = option == BroadcastBuffers::yes;
          for (int step = 0; step < 3; ++step) {
            forward(step).backward();
            expect(buffers(net) == buffers(first ? of_first : own), "after step {}", step);
            if (first) own.load_state_dict(of_first.state_dict());
          }
          {
            const auto guard = replicas.no_sync();
            forward(3).backward();
            expect(buffers(net) == buffers(own), "a backward without communication");
          }
          // Where its own forward runs, the module's buffers of now are meant.
          if (!by_parts) net.norm.running_mean.set(clone(net.norm.running_mean));
          forward(4).backward();
          expect(buffers(net) == buffers(first ? of_first : own), "the next one");
        }));
}

TEST_CASE("a graph that keeps a buffer which was shared since is refused, unless each rank keeps its own") {
  using shard::BroadcastBuffers;
  for (int ranks : worlds)
    for (BroadcastBuffers option : {BroadcastBuffers::yes, BroadcastBuffers::no})
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Masked net;
        const shard::DataParallel replicas(net, world.group(), {.broadcast_buffers = option});
        const Tensor x = data_of(world.rank(), 0), both = add(sum(net(x)), sum(net(x)));
        both.backward({}, true);  // several forwards before a backward are none of that
        if (ranks > 1 && option == BroadcastBuffers::yes)
          expect_refusal([&] { both.backward(); }, {"was changed in place"});
        else
          both.backward();
      }));
}

TEST_CASE("a gradient that is not as its parameter is refused before anything is averaged") {
  for (const Tensor& odd : {zeros({14}), zeros({1}), zeros({7}, {f64})})
    for (bool synchronising : {false, true})
      CHECK_NOTHROW(run_ranks(2, [&](World& world) {
        Net net = net_of(0);
        const Gradients by_hand = average_by_hand(net, 2, 0, [](int) { return true; });
        shard::DataParallel replicas(net, world.group());
        {
          const auto guard = replicas.no_sync();
          sum(net(data_of(world.rank(), 0), true)).backward();
        }
        net.first.bias.set_grad(odd);
        const Gradients before = gradients(net.second);
        {
          std::optional<shard::DataParallel::NoSync> guard;
          if (!synchronising) guard.emplace(replicas);
          expect_refusal([&] { sum(net(data_of(world.rank(), 0), true)).backward(); },
                         {"'first.bias'", "clear it"});
        }
        expect(gradients(net.second) == before, "the others' gradients");
        net.zero_grad();
        sum(net(data_of(world.rank(), 0), true)).backward();
        expect(gradients(net) == by_hand, "afterwards");
      }));
}

TEST_CASE("a module that was cast is refused, also where its own forward does not run") {
  CHECK_NOTHROW(run_ranks(2, [&](World& world) {
    Net net = net_of(0);
    const shard::DataParallel replicas(net, world.group());
    net.to(f64);
    const Tensor loss = sum(net.extra(to(data_of(world.rank(), 0), f64)));
    expect_refusal([&] { loss.backward(); }, {"'extra.bias'", "make it anew"});
  }));
}

// ---- unlike numbers of inputs ----

namespace {

/// One model that goes through the averages of ranks with `counts` inputs each: what all have in the end.
struct Joined {
  Normed net;
  Joined(Normed&& first, const std::vector<int>& counts, bool by_initial) : net(std::move(first)) {
    const int most = *std::ranges::max_element(counts);
    nn::Sgd sgd(net.parameters(), {.lr = 0.1});
    for (int step = 0; step < most; ++step) {
      const nn::StateDict before = net.clone().state_dict();
      nn::StateDict of_first;  // its buffers
      std::vector<Tensor> sums;
      int in = 0;
      for (int rank = 0; rank < std::ssize(counts); ++rank) {
        if (step >= counts[static_cast<std::size_t>(rank)]) continue;
        net.load_state_dict(before);
        net.zero_grad();
        mean(square(to(net(to(data_of(rank, step), net.first.weight.local().dtype())), f32))).backward();
        if (in++ == 0) of_first = net.clone().state_dict();
        const NoGrad guard;
        const std::vector<nn::Parameter> parameters = net.parameters();
        sums.resize(parameters.size());
        for (std::size_t p = 0; p < sums.size(); ++p) {
          const Tensor wide = to(parameters[p].grad(), f32);
          sums[p] = sums[p].defined() ? add(sums[p], wide) : clone(wide);
        }
      }
      net.load_state_dict(of_first);
      const auto by = static_cast<double>(by_initial ? std::ssize(counts) : in);
      std::vector<nn::Parameter> parameters = net.parameters();
      for (std::size_t p = 0; p < sums.size(); ++p)
        parameters[p].set_grad(to(div(sums[p], by), parameters[p].local().dtype()));
      sgd.step();
    }
  }
};

}  // namespace

TEST_CASE("ranks with unlike numbers of inputs train like one model, and end alike") {
  const std::vector<std::vector<int>> cases = {{3},    {2, 2},    {1, 3},    {3, 1},
                                               {0, 2}, {2, 4, 1}, {0, 0, 3}, {1, 3, 3, 2}};
  for (const std::vector<int>& counts : cases)
    for (const bool by_initial : {true, false})
      for (const DType dtype : {f32, bf16})
        for (const std::int64_t bucket_bytes : {1, 1 << 20})
          CHECK_NOTHROW(run_ranks(static_cast<int>(counts.size()), [&](World& world) {
            manual_seed(3);
            Normed net;
            net.to(dtype);
            const Joined expected(net.clone(), counts, by_initial);
            shard::DataParallel replicas(net, world.group(), {.bucket_bytes = bucket_bytes});
            nn::Sgd sgd(net.parameters(), {.lr = 0.1});
            {
              const auto scope = replicas.join({.divide_by_initial_world_size = by_initial});
              for (int step = 0; step < counts[static_cast<std::size_t>(world.rank())]; ++step) {
                mean(square(to(net(to(data_of(world.rank(), step), dtype)), f32))).backward();
                sgd.step();
                sgd.zero_grad();
              }
            }
            expect(parameters(net) == parameters(expected.net), "parameters");
            expect(buffers(net) == buffers(expected.net), "buffers");
            const std::uint64_t calls = collective_calls();
            mean(square(to(net(to(data_of(world.rank(), 9), dtype)), f32))).backward();
            expect(world.size() == 1 || collective_calls() > calls, "no average after the scope");
          }));
}

TEST_CASE("a join may end for all ranks when it ends for one, and the model goes on") {
  for (const int ranks : {2, 3, 4})
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      Net net = net_of(0);
      shard::DataParallel replicas(net, world.group());
      int steps = 0;
      expect_refusal(
          [&] {
            const auto scope = replicas.join({.throw_on_early_termination = true});
            expect_refusal([&] { const auto inner = replicas.join(); }, {"join within a join"});
            for (; steps < 2 + world.rank(); ++steps)
              sum(net(data_of(world.rank(), steps), false)).backward();
          },
          {"Detected at least one rank that exhausted inputs. Throwing across all ranks. The first is rank "
           "0"});
      expect(steps == 2, "{} steps", steps);
      net.zero_grad();
      Net by_hand = net_of(0);
      sum(net(data_of(world.rank(), 5), false)).backward();
      expect(gradients(net) == average_by_hand(by_hand, ranks, 5, [](int) { return false; }), "afterwards");
      {
        const auto scope = replicas.join({.throw_on_early_termination = true});
        net.zero_grad();
        sum(net(data_of(world.rank(), 6), false)).backward();
      }
    }));
}

TEST_CASE("an exception leaves a join alone, and the other ranks hear of it") {
  CHECK_THROWS_WITH(run_ranks(3,
                              [&](World& world) {
                                Net net = net_of(0);
                                shard::DataParallel replicas(net, world.group());
                                const auto scope = replicas.join();
                                sum(net(data_of(world.rank(), 0), false)).backward();
                                if (world.rank() == 1) throw std::runtime_error("no more of this");
                              }),
                    "no more of this");
}

TEST_CASE("in a static graph each backward uses what the first one used, or names what it does not") {
  for (int ranks : worlds)
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      Net net = net_of(0), by_hand = net_of(0);
      shard::DataParallel replicas(net, world.group(), {.static_graph = true});
      const auto uses_extra = [&](int rank) { return rank == ranks - 1; };
      const bool mine = uses_extra(world.rank());
      {
        const auto guard = replicas.no_sync();  // says nothing yet
        sum(net(data_of(world.rank(), 0), !mine)).backward();
        net.zero_grad();
      }
      for (int step = 0; step < 3; ++step) {
        net.zero_grad();
        sum(net(data_of(world.rank(), step), mine)).backward();
        expect(gradients(net) == average_by_hand(by_hand, ranks, step, uses_extra), "step {}", step);
      }
      const Gradients before = gradients(net);
      expect_refusal([&] { sum(net(data_of(world.rank(), 3), !mine)).backward(); },
                     {"'extra.", mine ? "is not used in this backward and was in the first one"
                                      : "is used in this backward and was not in the first one"});
      expect(gradients(net) == before, "a refusal changed gradients");
      net.zero_grad();
      sum(net(data_of(world.rank(), 4), mine)).backward();
      expect(gradients(net) == average_by_hand(by_hand, ranks, 4, uses_extra), "after a refusal");
    }));
}

TEST_CASE("a step of a static graph is captured from the second one on, whatever it leaves out") {
  for (int ranks : worlds)
    for (const bool some_use_it : {false, true})
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Net net = net_of(0), by_hand = net_of(0);
        const auto uses_extra = [&](int rank) { return some_use_it && rank == 0; };
        const shard::DataParallel replicas(net, world.group(), {.static_graph = true});
        const Step step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
          sum(net(in[0], uses_extra(world.rank()))).backward();
          std::vector<Tensor> found;
          for (const nn::Parameter& p : net.parameters())
            if (p.grad().defined()) found.push_back(clone(p.grad()));
          net.zero_grad();
          return found;
        };
        step(std::vector{data_of(world.rank(), 0)});
        Program program = capture(step, {data_of(world.rank(), 1)});
        const std::vector<Tensor> found = program.replay({data_of(world.rank(), 2)});
        Gradients of_all;
        for (const Tensor& g : found) of_all.push_back(g.to_vector<float>());
        Gradients expected = average_by_hand(by_hand, ranks, 2, uses_extra);
        std::erase_if(expected, [](const auto& g) { return g.empty(); });
        expect(of_all == expected, "what was replayed");
      }));
}

// ---- the module that it is of; communication hooks ----

TEST_CASE("a data parallel object goes with its module, and names one that is gone") {
  for (const int ranks : worlds)
    CHECK_NOTHROW(run_ranks(ranks, [](World& world) {
      auto first = std::make_unique<Normed>();
      shard::DataParallel parallel(*first, world.group(), {.bucket_bytes = 40});
      const auto step = [&](nn::Module& module) {
        const Tensor loss = sum(square(parallel(data_of(world.rank(), 1))));
        module.zero_grad();
        loss.backward();
        const Tensor mean = clone(module.named_buffers()[0].tensor);
        world.group().broadcast(mean, 0);
        expect(mean.to_vector<float>() == module.named_buffers()[0].tensor.to_vector<float>(),
               "rank 0's buffers");
      };
      step(*first);
      const Tensor before = sum(square(parallel(data_of(world.rank(), 2))));
      Normed second = std::move(*first);
      first.reset();
      expect(&parallel.module() == &second, "moved once");
      before.backward();
      step(second);
      Normed third;
      third = std::move(second);
      expect(&parallel.module() == &third, "moved into another");
      step(third);
      Tensor later;
      {
        const Normed last = std::move(third);
        later = sum(square(parallel(data_of(world.rank(), 3))));
      }
      later.backward();
      expect(message_of<StateError>([&] { parallel.module(); }).find("is gone") != std::string::npos, "gone");
      const std::string called = message_of<StateError>([&] { parallel(data_of(0, 0)); });
      expect(called.find("is gone") != std::string::npos, "'{}'", called);
    }));
}

TEST_CASE("a call of the object is a forward, and of several tensors the module's") {
  CHECK_NOTHROW(run_ranks(2, [](World& world) {
    Net net;
    const shard::DataParallel parallel(net, world.group());
    const std::string text = message_of<StateError>([&] { parallel(data_of(0, 0)); });
    expect(text.find("does not map one tensor to one tensor") != std::string::npos, "'{}'", text);
  }));
}

namespace {

/// Sums in `dtype`, which travels in place of the gradients, as PyTorch's fp16_compress_hook and
/// bf16_compress_hook do.
shard::CommHook compressed(DType dtype) {
  return [dtype](const Tensor& bucket, const Tensor&, const Group& ranks) {
    const Tensor small = to(bucket, dtype);
    ranks.all_reduce(small, ReduceOp::average());
    copy_(bucket, small);
  };
}

Tensor loss_at(Net& net, int rank, int step, bool with_extra) {
  return sum(square(net(data_of(rank, step), with_extra)));
}

}  // namespace

TEST_CASE("a communication hook takes the place of the averages, in buckets of any size") {
  for (const int ranks : worlds)
    for (const std::int64_t bytes : {40, 200, 1 << 20})
      for (const DType dtype : {f32, f16, bf16})
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          Net net = net_of(0);
          shard::DataParallel parallel(net, world.group(), {.bucket_bytes = bytes});
          int calls = 0;
          parallel.register_comm_hook([&](const Tensor& bucket, const Tensor& out, const Group& group) {
            ++calls;
            compressed(dtype)(bucket, out, group);
          });
          for (const bool with_extra : {false, true}) {
            net.zero_grad();
            {
              const auto scope = parallel.no_sync();
              loss_at(net, world.rank(), 0, with_extra).backward();
            }
            expect(calls == 0, "{} calls without averaging", calls);
            loss_at(net, world.rank(), 1, with_extra).backward();
            const bool any = world.size() > 1;
            expect((calls > 0) == any, "{} calls", calls);
            calls = 0;
            // Each rank's sum in the dtype that travels; the average is rounded to it once.
            Net by_hand = net_of(0);
            std::vector<Tensor> sums;
            for (int rank = 0; rank < world.size(); ++rank) {
              by_hand.zero_grad();
              for (const int step : {0, 1}) loss_at(by_hand, rank, step, with_extra).backward();
              std::size_t i = 0;
              for (const nn::Parameter& p : by_hand.parameters()) {
                const Tensor g = p.grad().defined() ? p.grad() : zeros(p.shape());
                const Tensor part = to(any ? to(g, dtype) : g, f32);
                if (rank == 0)
                  sums.push_back(clone(part));
                else
                  add_(sums[i], part);
                ++i;
              }
            }
            std::size_t i = 0;
            for (const nn::NamedParameter& p : net.named_parameters()) {
              const Tensor mean = div(sums[i++], double(world.size()));
              const Tensor expected = any ? to(to(mean, dtype), f32) : mean;
              const bool used = with_extra || !p.name.starts_with("extra");
              expect(p.parameter.grad().defined() == used, "'{}' has a gradient", p.name);
              if (used)
                expect(p.parameter.grad().to_vector<float>() == expected.to_vector<float>(), "'{}' in {}",
                       p.name, name_of(dtype));
            }
          }
          const std::string twice =
              message_of<StateError>([&] { parallel.register_comm_hook(compressed(f16)); });
          expect(twice.find("already") != std::string::npos, "'{}'", twice);
        }));
}

TEST_CASE("with a communication hook ranks with unlike numbers of inputs make the same calls") {
  for (const int ranks : worlds)
    for (const bool by_all : {true, false})
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Net net = net_of(0), plain = net_of(0);
        shard::DataParallel hooked(net, world.group()), averaged(plain, world.group());
        hooked.register_comm_hook(compressed(f32));
        nn::Sgd optimizer(net.parameters(), {.lr = 0.1}), reference(plain.parameters(), {.lr = 0.1});
        const auto run = [&](Net& n, shard::DataParallel& parallel, nn::Optimizer& sgd, bool divides_by_all) {
          const auto scope = parallel.join({.divide_by_initial_world_size = divides_by_all});
          for (int step = 0; step <= world.rank(); ++step) {
            sgd.zero_grad();
            loss_at(n, world.rank(), step, true).backward();
            sgd.step();
          }
        };
        run(net, hooked, optimizer, by_all);
        run(plain, averaged, reference, true);
        const auto found = net.parameters(), expected = plain.parameters();
        for (std::size_t i = 0; i < found.size(); ++i)
          expect(found[i].data().to_vector<float>() == expected[i].data().to_vector<float>(), "parameter {}",
                 i);
      }));
}
