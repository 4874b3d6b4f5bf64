// What programs do with a sharded model beside plain steps: gradients stay those of replicas.
#include <array>
#include <memory>
#include <optional>

#include "shard/fully_shard.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// One layer that a forward may leave out.
struct Branch final : nn::Layer<Branch> {
  nn::Linear first{5, 7}, second{7, 3}, extra{5, 3};
  Tensor forward(const Tensor& x, bool with_extra) const {
    const Tensor y = second(relu(first(x)));
    return with_extra ? add(y, extra(x)) : y;
  }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
    on("extra", extra);
  }
};

/// tanh of its layer, unless told to pass on what it gets.
struct Link final : nn::Layer<Link> {
  nn::Linear layer{5, 5};
  bool used = true;
  Tensor forward(const Tensor& x) const { return used ? tanh(layer(x)) : x; }
  void visit(auto&& on) { on("layer", layer); }
};

/// How a chain runs its links: plainly, in regions, or in regions that take what the link gives as a
/// constant.
enum class Runs { plainly, again, again_and_blind };

/// Links in a row; the first ones run once more at the end.
struct Chain final : nn::Layer<Chain> {
  nn::Linear first{5, 5};
  nn::ModuleList<Link> links;
  std::size_t again = 0;
  Runs runs = Runs::plainly;
  Chain() {
    for (int i = 0; i < 5; ++i) links.emplace_back();
  }
  Tensor forward(const Tensor& x) {
    Tensor y = first(x);
    for (Link& link : links) y = run(link, y);
    for (std::size_t i = 0; i < again; ++i) y = run(links[i], y);
    return y;
  }
  Tensor run(Link& link, const Tensor& x) const {
    if (runs == Runs::plainly) return link(x);
    return recompute([&] {
      if (runs == Runs::again) return link(x);
      const auto constant = [&] {
        const NoGrad guard;
        return link(x);
      };
      return tanh(mul(x, constant()));
    });
  }
  void visit(auto&& on) {
    on("first", first);
    on("links", links);
  }
};

/// Rank 0 uses the links whose bit is set in `mask`, the others use the rest of them and the last one.
Tensor chain_loss(Chain& chain, int rank, unsigned mask) {
  const unsigned bits = rank == 0 ? mask : ~mask | 16u;
  for (std::size_t i = 0; i < 5; ++i) chain.links[i].used = (bits >> i & 1) != 0;
  return sum(square(chain(batch_of(rank, 0, 5).x)));
}

/// Two layers with one weight; the first, whose group owns it, may be left out.
struct Shared final : nn::Layer<Shared> {
  nn::Linear first{5, 5}, second{5, 5};
  Shared() { nn::tie(first.weight, second.weight); }
  Tensor forward(const Tensor& x, bool both) const { return second(both ? tanh(first(x)) : x); }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
  }
};

Branch seeded_branch() {
  manual_seed(1);
  return {};
}

Tensor branch_loss(Branch& branch, int rank, int step, bool with_extra) {
  return sum(square(branch(batch_of(rank, step, 5).x, with_extra)));
}

std::int64_t gathers(const OrderLog& log) {
  return std::ranges::count_if(
      log.lines(), [](const std::string& line) { return line.find("all_gather") != std::string::npos; });
}

}  // namespace

TEST_CASE(
    "a parameter that some ranks use gets their part, one that none uses gets nothing, or zeros in the flat "
    "layout") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (int users = 0; users <= world.size(); ++users) {
      const auto uses = [&](int rank) { return rank >= world.size() - users; };
      Branch by_hand = seeded_branch(), branch = seeded_branch();
      shard::fully_shard(branch, {.layout = layout});
      nn::AdamW optimizer(branch.parameters(), {.weight_decay = 0.5}),
          reference(by_hand.parameters(), {.weight_decay = 0.5});
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        branch_loss(branch, world.rank(), step, uses(world.rank())).backward();
        const Gradients averages = average_by_hand(by_hand, world.size(), [&](int rank) {
          branch_loss(by_hand, rank, step, uses(rank)).backward();
        });
        const Gradients expected = as_sharded(averages, branch);
        expect_gradients(branch, world, expected, "some ranks");
        const bool zeros = users == 0 && layout == shard::GroupLayout::flat;
        expect((expected == averages) != zeros, "zeros where nobody used it, and only there");
        set_gradients(by_hand, expected);
        optimizer.step();
        reference.step();
      }
      expect_values(branch, by_hand, "after steps");
    }
  });
}

/// The first `again` links run twice; which links do anything differs from rank to rank.
void expect_any_mixture(World& world, shard::GroupLayout layout, std::size_t again, Runs runs) {
  manual_seed(1);
  Chain by_hand;
  by_hand.again = again;
  by_hand.runs = runs;
  Chain chain = by_hand.clone();
  for (Link& link : chain.links) shard::fully_shard(link, {.layout = layout});
  shard::fully_shard(chain, {.layout = layout});
  for (unsigned mask = 0; mask < 32; ++mask) {
    chain.zero_grad();
    chain_loss(chain, world.rank(), mask).backward();
    const Gradients expected =
        average_by_hand(by_hand, world.size(), [&](int rank) { chain_loss(by_hand, rank, mask).backward(); });
    const std::string found = difference(whole_gradients(chain, world.group()), expected);
    expect(found.empty(), "mask {}, {} links again, runs {}: {}", mask, again, static_cast<int>(runs), found);
  }
}

TEST_CASE("ranks may use the layers of different groups, in any mixture", "[threads meet]") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const std::size_t again : {0, 2, 5}) expect_any_mixture(world, layout, again, Runs::plainly);
  });
}

TEST_CASE("regions may run the layers of different groups again, in any mixture", "[threads meet]") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const Runs runs : {Runs::again, Runs::again_and_blind})
      for (const std::size_t again : {0, 2}) expect_any_mixture(world, layout, again, runs);
  });
}

TEST_CASE("the input's gradient passes frozen layers, whichever a rank uses") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    manual_seed(1);
    Chain by_hand;
    by_hand.set_requires_grad(false);
    Chain chain = by_hand.clone();
    for (Link& link : chain.links) shard::fully_shard(link, {.layout = layout});
    shard::fully_shard(chain, {.layout = layout});
    for (unsigned mask = 0; mask < 32; ++mask) {
      const auto gradient = [&](Chain& c) {
        for (std::size_t i = 0; i < 5; ++i)
          c.links[i].used = ((world.rank() == 0 ? mask : ~mask) >> i & 1) != 0;
        Tensor x = batch_of(world.rank(), 0, 5).x.requires_grad_();
        sum(square(c(x))).backward();
        return x.grad().to_vector<float>();
      };
      expect(gradient(chain) == gradient(by_hand), "mask {}", mask);
    }
  });
}

/// Two models in a row, each its own root, where rank 0 uses the links of `of_first` in the first model and
/// other ranks the links of `of_others` in the second.
void expect_two_models(World& world, shard::GroupLayout layout, unsigned of_first, unsigned of_others) {
  manual_seed(1);
  Chain first_by_hand, second_by_hand;
  Chain first = first_by_hand.clone(), second = second_by_hand.clone();
  for (Chain* chain : {&first, &second}) {
    for (Link& link : chain->links) shard::fully_shard(link, {.layout = layout});
    shard::fully_shard(*chain, {.layout = layout});
  }
  const auto backward = [&](Chain& a, Chain& b, int rank) {
    for (std::size_t i = 0; i < 5; ++i) {
      a.links[i].used = rank != 0 || (of_first >> i & 1) != 0;
      b.links[i].used = rank == 0 || (of_others >> i & 1) != 0;
    }
    sum(square(b(a(batch_of(rank, 0, 5).x)))).backward();
  };
  for (int times = 0; times < 2; ++times) {
    for (Chain* chain : {&first, &second}) chain->zero_grad();
    backward(first, second, world.rank());
    const auto by_hand = [&](int rank) { backward(first_by_hand, second_by_hand, rank); };
    const Gradients of_first_model = average_by_hand(first_by_hand, world.size(), by_hand);
    second_by_hand.zero_grad();
    const Gradients of_second_model = average_by_hand(second_by_hand, world.size(), by_hand);
    first_by_hand.zero_grad();
    expect_gradients(first, world, of_first_model, "the first model");
    expect_gradients(second, world, of_second_model, "the second model");
  }
}

TEST_CASE("two models in one graph", "[threads meet]") {
  on_ranks([](World& world, shard::GroupLayout layout) { expect_two_models(world, layout, 31, 31); });
}

TEST_CASE("two models in one graph, of which ranks use different layers") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const unsigned of_first : {31u, 0u, 10u})
      for (const unsigned of_others : {31u, 0u, 21u}) expect_two_models(world, layout, of_first, of_others);
  });
}

TEST_CASE("a module within is used alone, before and after the whole") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Twins twins({.layout = layout});
    const auto loss = [](Net& net, int rank, int step) {
      const Tensor x = batch_of(rank, step, net.width).x;
      const Tensor before = sum(square(net.blocks[1](x)));
      const Tensor whole = sum(square(net(x)));
      return add(add(before, whole), sum(square(net.blocks[0](x))));
    };
    for (const int step : {0, 1}) {
      twins.net.zero_grad();
      loss(twins.net, world.rank(), step).backward();
      expect_gradients(twins.net, world,
                       average_by_hand(twins.by_hand, world.size(),
                                       [&](int rank) { loss(twins.by_hand, rank, step).backward(); }),
                       "parts and the whole");
    }
  });
}

TEST_CASE("a gradient of gradients reaches sharded parameters") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    manual_seed(1);
    Chain by_hand;
    Chain chain = by_hand.clone();
    for (Link& link : chain.links) shard::fully_shard(link, {.layout = layout});
    shard::fully_shard(chain, {.layout = layout});
    const auto penalty = [](Chain& c, int rank) {
      const Tensor x = batch_of(rank, 0, 5).x.requires_grad_();
      const Tensor slope =
          grad(sum(square(c(x))), std::array{x}, {}, {.retain_graph = true, .create_graph = true})[0];
      return sum(square(slope));
    };
    for (int times = 0; times < 2; ++times) {
      chain.zero_grad();
      penalty(chain, world.rank()).backward();
      expect_gradients(
          chain, world,
          average_by_hand(by_hand, world.size(), [&](int rank) { penalty(by_hand, rank).backward(); }),
          "of a penalty on slopes");
    }
  });
}

TEST_CASE("a group that no rank runs has no gradients, and costs no calls in backward") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Branch by_hand = seeded_branch(), branch = seeded_branch();
    shard::fully_shard(branch.extra, {.layout = layout});
    shard::fully_shard(branch, {.layout = layout});
    for (int step = 0; step < 4; ++step) {
      const bool with_extra = step % 2 == 1;
      branch.zero_grad();
      OrderLog log;
      branch_loss(branch, world.rank(), step, with_extra).backward();
      const auto reductions = std::ranges::count_if(log.lines(), [](const std::string& line) {
        return line.find("reduce_scatter") != std::string::npos;
      });
      expect(reductions == (with_extra ? 2 : 1), "{} reductions in step {}", reductions, step);
      expect_gradients(
          branch, world,
          average_by_hand(by_hand, world.size(),
                          [&](int rank) { branch_loss(by_hand, rank, step, with_extra).backward(); }),
          "a group left out");
    }
  });
}

TEST_CASE("several forwards before one backward, and as many backwards as forwards") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Twins twins({.layout = layout});
    add(loss_at(twins.net, world.rank(), 0), loss_at(twins.net, world.rank(), 1)).backward();
    expect_gradients(
        twins.net, world,
        average_by_hand(twins.by_hand, world.size(),
                        [&](int rank) {
                          add(loss_at(twins.by_hand, rank, 0), loss_at(twins.by_hand, rank, 1)).backward();
                        }),
        "one backward");
    twins.net.zero_grad();
    const Tensor first = loss_at(twins.net, world.rank(), 2), second = loss_at(twins.net, world.rank(), 3);
    first.backward();
    second.backward();
    expect_gradients(twins.net, world, plus(plain(twins.by_hand, world, 2), plain(twins.by_hand, world, 3)),
                     "two backwards");
    twins.net.zero_grad();
    const Tensor last = loss_at(twins.net, world.rank(), 4);
    last.backward({}, true);
    last.backward();
    const Gradients once = plain(twins.by_hand, world, 4);
    expect_gradients(twins.net, world, plus(once, once), "the same graph twice");
  });
}

TEST_CASE("forwards without gradients and forwards that are given up leave nothing behind") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Twins twins({.layout = layout});
    const auto look = [&] {
      const NoGrad guard;
      const float seen = loss_at(twins.net, world.rank(), 90).item<float>();
      expect(seen == loss_at(twins.by_hand, world.rank(), 90).item<float>(), "a look saw {}", seen);
    };
    const auto give_up = [&] { loss_at(twins.net, world.rank(), 91); };
    for (int step = 0; step < 4; ++step) {
      twins.net.zero_grad();
      if (step % 2 == 0) look();
      give_up();
      const Tensor loss = loss_at(twins.net, world.rank(), step);
      look();
      if (step > 1) give_up();
      loss.backward();
      look();
      expect_gradients(twins.net, world, plain(twins.by_hand, world, step), "beside other forwards");
    }
  });
}

TEST_CASE("evaluation between steps sees the stepped weights") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const auto strategy :
         {shard::ShardingStrategy::full_shard, shard::ShardingStrategy::shard_grad_op}) {
      Twins twins({.layout = layout, .strategy = strategy});
      nn::Adam adam(twins.net.parameters()), reference(twins.by_hand.parameters());
      for (int step = 0; step < 3; ++step) {
        twins.net.zero_grad();
        loss_at(twins.net, world.rank(), step).backward();
        set_gradients(twins.by_hand, plain(twins.by_hand, world, step));
        for (int look = 0; look < 2; ++look) {
          const NoGrad guard;
          expect(
              loss_at(twins.net, world.rank(), 50).item() == loss_at(twins.by_hand, world.rank(), 50).item(),
              "look {} of step {}", look, step);
          if (look == 0) {
            adam.step();
            reference.step();
          }
        }
      }
    }
  });
}

TEST_CASE("a weight that was looked at and then stepped is new to whoever shares it") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    manual_seed(1);
    Shared by_hand;
    Shared shared = by_hand.clone();
    const shard::Options kept{.layout = layout, .reshard_after_forward = false, .forward_prefetch = 0};
    shard::fully_shard(shared.first, kept);
    shard::fully_shard(shared, kept);
    nn::Sgd sgd(shared.parameters(), {.lr = 0.1}), reference(by_hand.parameters(), {.lr = 0.1});
    const auto loss = [](Shared& s, int rank, bool both) {
      return sum(square(s(batch_of(rank, 0, 5).x, both)));
    };
    for (int step = 0; step < 2; ++step) {
      shared.zero_grad();
      loss(shared, world.rank(), true).backward();
      set_gradients(by_hand, average_by_hand(by_hand, world.size(),
                                             [&](int rank) { loss(by_hand, rank, true).backward(); }));
      const NoGrad guard;
      loss(shared, world.rank(), true);
      sgd.step();
      reference.step();
      for (const bool both : {false, true})
        expect(loss(shared, world.rank(), both).item() == loss(by_hand, world.rank(), both).item(),
               "after step {}", step);
    }
  });
}

TEST_CASE("inputs get their own rank's gradient") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Twins twins({.layout = layout});
    const auto gradient_of_input = [&](Net& net) {
      Tensor x = batch_of(world.rank(), 0, net.width).x.requires_grad_();
      sum(square(net(x))).backward();
      return x.grad().to_vector<float>();
    };
    expect(gradient_of_input(twins.net) == gradient_of_input(twins.by_hand), "the input's gradient");

    Tensor x = batch_of(world.rank(), 1, twins.net.width).x.requires_grad_();
    twins.net.zero_grad();
    const Tensor of_net = grad(sum(square(twins.net(x))), std::array{x})[0];
    const Tensor expected = grad(sum(square(twins.by_hand(x))), std::array{x})[0];
    expect(of_net.to_vector<float>() == expected.to_vector<float>(), "the input's gradient alone");
    for (const nn::Parameter& p : twins.net.parameters())
      expect(!p.grad().defined(), "a gradient that nobody asked for");
    loss_at(twins.net, world.rank(), 2).backward();
    expect_gradients(twins.net, world, plain(twins.by_hand, world, 2), "after a gradient of inputs alone");
  });
}

TEST_CASE("a sharded model's output is written in place as a plain one's") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Twins twins({.layout = layout});
    const auto gradient_of_input = [&](Net& net) {
      Tensor x = batch_of(world.rank(), 0, net.width).x.requires_grad_();
      const Tensor y = net(x);
      mul_(y, 3.0);
      mul_(y, y);
      return grad(sum(y), std::array{x})[0].to_vector<float>();
    };
    expect(gradient_of_input(twins.net) == gradient_of_input(twins.by_hand), "the input's gradient");
  });
}

TEST_CASE("a loss outlives its model") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Tensor x = batch_of(world.rank(), 0, 5).x.requires_grad_(), loss, expected;
    {
      Twins twins({.layout = layout});
      loss = sum(square(twins.net(x)));
      expected = grad(sum(square(twins.by_hand(x))), std::array{x})[0];
    }
    loss.backward();
    expect(x.grad().to_vector<float>() == expected.to_vector<float>(), "the input's gradient");
  });
}

TEST_CASE("without synchronisation a rank has its own whole gradients, which the next average includes") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Twins twins({.layout = layout});
    for (int step : {0, 1}) {
      const auto guard = shard::no_sync(twins.net);
      loss_at(twins.net, world.rank(), step).backward();
      loss_at(twins.by_hand, world.rank(), step).backward();
    }
    expect(difference(gradients(twins.net), gradients(twins.by_hand)).empty(), "this rank's own");
    for (const nn::Parameter& p : twins.net.parameters())
      expect(p.grad().shape() == p.shape(), "a whole gradient of shape {}", p.grad().shape());
    loss_at(twins.net, world.rank(), 2).backward();
    const Gradients all = average_by_hand(twins.by_hand, world.size(), [&](int rank) {
      for (int step : {0, 1, 2}) loss_at(twins.by_hand, rank, step).backward();
    });
    expect_gradients(twins.net, world, all, "the average of the sums");

    shard::set_requires_gradient_sync(twins.net, false);
    loss_at(twins.net, world.rank(), 3).backward();
    shard::set_requires_gradient_sync(twins.net, true);
    loss_at(twins.net, world.rank(), 4).backward();
    const Gradients more = average_by_hand(twins.by_hand, world.size(), [&](int rank) {
      for (int step : {3, 4}) loss_at(twins.by_hand, rank, step).backward();
    });
    expect_gradients(twins.net, world, plus(all, more), "added to what was averaged before");
  });
}

TEST_CASE("a scope without synchronisation ends for what its module is then, and for that alone") {
  using enum shard::ShardingStrategy;
  for (const shard::ShardingStrategy strategy : {full_shard, shard_grad_op, zero1, no_shard})
    on_ranks([strategy](World& world, shard::GroupLayout layout) {
      Twins twins({.layout = layout, .strategy = strategy});
      const auto averages = [&](Net& net, DType dtype) {
        Net by_hand({.uneven = true});
        by_hand.to(dtype);
        for (Net* n : {&net, &by_hand}) {
          n->zero_grad();
          Batch batch = batch_of(world.rank(), 0, n->width);
          batch.x = to(batch.x, dtype);
          loss_of(*n, batch).backward();
        }
        const Gradients found = whole_gradients(net, world.group());
        if (difference(found, gradients(by_hand)).empty()) return false;
        for (const nn::Parameter& p : by_hand.parameters())
          world.group().all_reduce(p.grad(), ReduceOp::average());
        const std::string other = difference(found, gradients(by_hand));
        expect(other.empty(), "neither the own gradient nor the average: {}", other);
        return true;
      };
      std::optional<Net> copy;
      {
        const auto outer = shard::no_sync(twins.net);
        expect(!averages(twins.net, f32), "in the scope");
        twins.net.to(f64);
        expect(!averages(twins.net, f64), "in the scope, cast");
        copy.emplace(twins.net.clone());
        shard::set_requires_gradient_sync(twins.net, true);
        expect(!averages(twins.net, f64), "in the scope, switched on");
      }
      expect(averages(*copy, f64), "a clone from within the scope");
      expect(averages(twins.net, f64), "after the scope");
      auto first = std::make_unique<shard::NoSync>(twins.net);
      auto second = std::make_unique<shard::NoSync>(twins.net);
      first.reset();
      expect(!averages(twins.net, f64), "one of two scopes");
      second.reset();
      expect(averages(twins.net, f64), "after both");
      {
        const auto scope = shard::no_sync(twins.net);
        shard::set_requires_gradient_sync(twins.net, false);
      }
      expect(!averages(twins.net, f64), "switched off in the scope");
      twins.net.to(f32);
      expect(!averages(twins.net, f32), "switched off, and cast");
    });
}

TEST_CASE("a cast to the dtype that shards have keeps all that backwards left, in whatever dtype") {
  using enum shard::ShardingStrategy;
  for (const shard::ShardingStrategy strategy : {full_shard, shard_grad_op, zero1, no_shard})
    on_ranks([strategy](World& world, shard::GroupLayout layout) {
      nn::Linear net(4, 5);
      shard::fully_shard(net,
                         {.layout = layout, .strategy = strategy, .mixed_precision = {.param_dtype = bf16}});
      const auto backward = [&] { sum(to(net(ones({2, 4})), f32)).backward(); };
      backward();
      {
        const auto own = shard::no_sync(net);
        backward();
      }
      net.to(f32);
      backward();
      // Each has gradients of 2, in every dtype.
      const Gradients expected{std::vector<float>(20, 6.F), std::vector<float>(5, 6.F)};
      expect_gradients(net, world, expected, "two averages and what came between");
    });
}

TEST_CASE("gradients accumulate in the reduce dtype; in the flat layout in the compute dtype") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    const DType kept = layout == shard::GroupLayout::flat ? bf16 : f32;
    Twins twins({.layout = layout, .mixed_precision = {.param_dtype = bf16, .reduce_dtype = f32}});
    const auto sums_of = [&](int rank, int microbatches) {
      std::vector<Tensor> sums;
      for (int i = 0; i < microbatches; ++i) {
        Net computing = twins.by_hand.clone();
        computing.to(bf16);
        Batch batch = batch_of(rank, i, computing.width);
        batch.x = to(batch.x, bf16);
        loss_of(computing, batch).backward();
        const std::vector<nn::Parameter> all = computing.parameters();
        for (std::size_t p = 0; p < all.size(); ++p) {
          const Tensor fresh = to(all[p].grad(), kept);
          if (i == 0)
            sums.push_back(clone(fresh));
          else
            add_(sums[p], fresh);
        }
      }
      return sums;
    };
    {
      const auto guard = shard::no_sync(twins.net);
      for (int i : {0, 1}) loss_at(twins.net, world.rank(), i).backward();
    }
    const std::vector<nn::Parameter> all = twins.net.parameters();
    const std::vector<Tensor> two = sums_of(world.rank(), 2);
    for (std::size_t p = 0; p < all.size(); ++p) {
      expect(all[p].grad().dtype() == kept, "parameter {} accumulates in another dtype", p);
      expect(to(all[p].grad(), f32).to_vector<float>() == to(two[p], f32).to_vector<float>(),
             "parameter {}'s own gradient", p);
    }
    loss_at(twins.net, world.rank(), 2).backward();
    Gradients expected;
    for (const Tensor& sum : sums_of(world.rank(), 3)) {
      const Tensor average = clone(to(sum, f32));
      world.group().all_reduce(average, ReduceOp::average());
      expected.push_back(average.to_vector<float>());
    }
    for (const nn::Parameter& p : all)
      if (p.grad().defined()) expect(p.grad().dtype() == f32, "as stored");
    expect_gradients(twins.net, world, expected, "three microbatches");
  });
}

TEST_CASE("parameters that stay gathered after backward save the gathers of the next forward") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Twins twins({.layout = layout});
    nn::Sgd sgd(twins.net.parameters(), {.lr = 0.1}), reference(twins.by_hand.parameters(), {.lr = 0.1});
    shard::set_reshard_after_backward(twins.net, false);
    // The gathers of a forward; its backward follows.
    const auto gathers_of = [&](int step) {
      OrderLog log;
      const Tensor loss = loss_at(twins.net, world.rank(), step);
      const auto count = gathers(log);
      loss.backward();
      return count;
    };
    expect(gathers_of(0) == 4, "the first forward gathers");
    expect(gathers_of(1) == 0, "nothing was written since");
    const Gradients both = plus(plain(twins.by_hand, world, 0), plain(twins.by_hand, world, 1));
    expect_gradients(twins.net, world, both, "two backwards of gathered parameters");
    set_gradients(twins.by_hand, both);
    sgd.step();
    reference.step();
    sgd.zero_grad();
    expect(gathers_of(2) == 4, "all was written");
    expect_gradients(twins.net, world, plain(twins.by_hand, world, 2), "after a step");

    shard::reshard(twins.net);
    expect(gathers_of(3) == 4, "all was freed");
    shard::set_reshard_after_backward(twins.net, true);
    gathers_of(4);
    expect(gathers_of(5) == 4, "backward frees again");
  });
}

TEST_CASE("what is trained may change from step to step") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Twins twins({.layout = layout});
    nn::AdamW adam(twins.net.parameters(), {.weight_decay = 0.3}),
        reference(twins.by_hand.parameters(), {.weight_decay = 0.3});
    const auto choose = [](Net& net, int step) {
      net.set_requires_grad(true);
      if (step == 1) net.blocks[1].set_requires_grad(false);
      if (step == 2)
        for (nn::NamedParameter& p : net.named_parameters())
          if (p.name.ends_with("bias")) p.parameter.set_requires_grad(false);
      if (step == 3) {
        net.set_requires_grad(false);
        net.blocks[0].norm.set_requires_grad(true);
      }
      if (step == 4) {
        net.set_requires_grad(false);
        net.head.set_requires_grad(true);
      }
    };
    for (int step : {0, 1, 2, 3, 4, 5, 1, 0}) {
      for (Net* net : {&twins.net, &twins.by_hand}) choose(*net, step);
      adam.zero_grad();
      loss_at(twins.net, world.rank(), step).backward();
      const Gradients expected = plain(twins.by_hand, world, step);
      expect_gradients(twins.net, world, expected, "what is trained");
      set_gradients(twins.by_hand, expected);
      adam.step();
      reference.step();
    }
    expect_values(twins.net, twins.by_hand, "after the steps");
  });
}

TEST_CASE("a loss without any trained parameter says so, and the model trains on") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Twins twins({.layout = layout});
    twins.net.set_requires_grad(false);
    const Tensor loss = loss_at(twins.net, world.rank(), 0);
    expect(!loss.requires_grad(), "nothing asks for a gradient");
    twins.net.set_requires_grad(true);
    loss_at(twins.net, world.rank(), 1).backward();
    expect_gradients(twins.net, world, plain(twins.by_hand, world, 1), "trained again");
  });
}
