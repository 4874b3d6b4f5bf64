// Parameters that the program gathers and frees by itself.
#include "autograd/autograd.h"
#include "collectives/observe.h"
#include "shard/fsdp.h"
#include "tests/sanitizer.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

std::int64_t gathers(const OrderLog& log) {
  return std::ranges::count_if(
      log.lines(), [](const std::string& line) { return line.find("all_gather") != std::string::npos; });
}

/// Every layout and strategy, slices and what is kept after forward among them.
template <class F>
void on_all_ways(F&& body) {
  using enum shard::ShardingStrategy;
  for (const int ranks : worlds())
    for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
      for (const shard::ShardingStrategy strategy : {full_shard, shard_grad_op, no_shard})
        for (const int kept : {1, 2, ranks}) {
          if (ranks % kept != 0 || (kept != ranks && strategy != full_shard)) continue;
          INFO(ranks << " ranks, layout " << static_cast<int>(layout) << ", strategy "
                     << static_cast<int>(strategy) << ", kept " << kept);
          CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
            body(world,
                 shard::Options{.layout = layout, .strategy = strategy, .reshard_after_forward = kept});
          }));
        }
}

/// Whether the parameters of `module` show the values of `by_hand`, whole.
void expect_whole(nn::Module& module, nn::Module& by_hand, bool whole, const char* when) {
  const auto found = module.parameters(), expected = by_hand.parameters();
  for (std::size_t p = 0; p < found.size(); ++p) {
    const Tensor shown = found[p].data();
    const bool is = shown.shape() == expected[p].shape() &&
                    shown.to_vector<float>() == expected[p].data().to_vector<float>();
    expect(is == whole || found[p].local().numel() == found[p].numel(), "{}: parameter {} of shape {}", when,
           p, shown.shape());
  }
}

/// Five layers, which may pass on what they get. A hook runs where the gradient comes to the last one's
/// input.
struct Link final : nn::Layer<Link> {
  nn::Linear layer{5, 5};
  bool used = true;
  Tensor forward(const Tensor& x) const { return used ? tanh(layer(x)) : x; }
  void visit(auto&& on) { on("layer", layer); }
};
struct Chain final : nn::Layer<Chain> {
  nn::Linear first{5, 5};
  nn::ModuleList<Link> links;
  std::function<void()> before_last;
  Chain() {
    for (int i = 0; i < 5; ++i) links.emplace_back();
  }
  Tensor forward(const Tensor& x) {
    Tensor y = first(x);
    for (std::size_t i = 0; i < 5; ++i) {
      if (i == 4 && before_last)
        register_hook(y, [act = before_last](const Tensor&) {
          act();
          return Tensor{};
        }).keep();
      y = links[i](y);
    }
    return y;
  }
  void visit(auto&& on) {
    on("first", first);
    on("links", links);
  }
};

/// Rank 0 uses the links whose bit is set in a mask, the others the rest of them.
void expect_any_mixture(World& world, Chain& chain, Chain& by_hand) {
  const auto loss = [](Chain& c, int rank, unsigned mask) {
    for (std::size_t i = 0; i < 5; ++i) c.links[i].used = ((rank == 0 ? mask : ~mask) >> i & 1) != 0;
    return sum(square(c(batch_of(rank, 0, 5).x)));
  };
  for (unsigned mask = 0; mask < 32; ++mask) {
    chain.zero_grad();
    loss(chain, world.rank(), mask).backward();
    expect_gradients(
        chain, world,
        average_by_hand(by_hand, world.size(), [&](int rank) { loss(by_hand, rank, mask).backward(); }),
        "of any mixture");
  }
}

}  // namespace

TEST_CASE("unshard gathers a module's own parameters once, for its next forward") {
  on_all_ways([](World& world, const shard::Options& options) {
    const bool cut = options.strategy != shard::ShardingStrategy::no_shard && world.size() > 1;
    Twins twins(options);
    Net& net = twins.net;
    for (const int step : {0, 1, 2}) {
      net.zero_grad();
      for (std::size_t b = 0; b < 3; ++b) {
        const OrderLog log;
        if (step == 2) {
          const shard::UnshardHandle handle = shard::unshard_async(net.blocks[b]);
          if (b == 1) handle.wait();
        } else {
          shard::unshard(net.blocks[b]);
        }
        expect(gathers(log) == (cut ? 1 : 0), "{} gathers of block {}", gathers(log), b);
        if (step < 2 || b == 1) expect_whole(net.blocks[b], twins.by_hand.blocks[b], true, "unsharded");
        shard::unshard(net.blocks[b]);
        expect(gathers(log) == (cut ? 1 : 0), "{} gathers for two calls", gathers(log));
      }
      if (step == 1) {
        shard::reshard(net);
        for (std::size_t b = 0; b < 3; ++b)
          expect_whole(net.blocks[b], twins.by_hand.blocks[b], !cut, "resharded");
      }
      const OrderLog log;
      const Tensor loss = loss_at(net, world.rank(), step);
      expect(gathers(log) == (!cut ? 0 : step == 1 ? 4 : 1), "{} gathers in forward {}", gathers(log), step);
      if (options.strategy == shard::ShardingStrategy::full_shard &&
          options.reshard_after_forward.ranks() != 1)
        expect_whole(net.blocks[0], twins.by_hand.blocks[0], !cut, "after forward");
      loss.backward();
      expect_gradients(net, world, plain(twins.by_hand, world, step), "unsharded before");
      shard::reshard(net);
    }
  });
}

TEST_CASE("what was unsharded is gathered anew when any rank wrote its part") {
  on_all_ways([](World& world, const shard::Options& options) {
    if (options.strategy == shard::ShardingStrategy::no_shard) return;
    Twins twins(options);
    for (const bool ran : {false, true}) {
      if (ran) loss_at(twins.net, world.rank(), 0).backward();
      twins.net.zero_grad();
      shard::unshard(twins.net.blocks[1]);
      const NoGrad guard;
      for (const nn::Parameter& p : twins.net.blocks[1].parameters())
        if (world.rank() == world.size() - 1) mul_(p.local(), 2);
      const nn::StateDict whole = shard::full_state_dict(twins.net.blocks[1]);
      for (const auto& [name, values] : whole)
        for (const nn::NamedParameter& p : twins.by_hand.blocks[1].named_parameters())
          if (p.name == name) copy_(p.parameter.local().detach(), values);
      if (ran) shard::unshard(twins.net.blocks[1]);
      if (ran) expect_whole(twins.net.blocks[1], twins.by_hand.blocks[1], true, "again");
      const float found = loss_at(twins.net, world.rank(), 1).item<float>(),
                  expected = loss_at(twins.by_hand, world.rank(), 1).item<float>();
      expect(found == expected, "a loss of {}, not {}", found, expected);
    }
  });
}

TEST_CASE("unshard is legal within forwards and backwards, and of what only an op reads") {
  struct Eager final : nn::ModuleObserver {
    Net* net = nullptr;
    std::vector<Subscription> hooks;
    void before_forward(nn::Module&, std::span<Tensor* const>) override {
      for (const std::size_t b : {2, 1}) shard::unshard(net->blocks[b]);
    }
    void after_forward(nn::Module&, std::span<Tensor* const> outputs) override {
      if (!outputs[0]->requires_grad()) return;
      hooks.push_back(register_hook(*outputs[0], [this](const Tensor&) {
        shard::unshard(net->blocks[0]);
        shard::unshard(*net);
        return Tensor{};
      }));
    }
  };
  on_all_ways([](World& world, const shard::Options& options) {
    Twins twins(options);
    Eager eager;
    eager.net = &twins.net;
    const Subscription watching = twins.net.blocks[0].observe(eager);
    const auto loss = [](Net& net, int rank, int step, bool unshards) {
      if (unshards) shard::unshard(net.blocks[2]);
      const Tensor read = sum(square(net.blocks[2].in.weight.tensor()));
      if (unshards) shard::reshard(net.blocks[2]);
      return add(loss_at(net, rank, step), read);
    };
    for (const int step : {0, 1}) {
      twins.net.zero_grad();
      loss(twins.net, world.rank(), step, true).backward();
      expect_gradients(twins.net, world,
                       average_by_hand(twins.by_hand, world.size(),
                                       [&](int rank) { loss(twins.by_hand, rank, step, false).backward(); }),
                       "with unshard anywhere");
    }
  });
}

TEST_CASE("unshard in a backward keeps the order of gathers, whatever layers ranks use", "[threads meet]") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    manual_seed(1);
    Chain by_hand;
    Chain chain = by_hand.clone();
    for (Link& link : chain.links) shard::fully_shard(link, {.layout = layout});
    shard::fully_shard(chain, {.layout = layout});
    for (const std::size_t wanted : {0, 2, 4}) {
      chain.before_last = [&] { shard::unshard(chain.links[wanted]); };
      expect_any_mixture(world, chain, by_hand);
    }
  });
}

TEST_CASE("prefetches after reductions, and by names, keep the order of gathers, whatever layers ranks use",
          "[threads meet]") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const bool named : {false, true}) {
      manual_seed(1);
      Chain by_hand;
      Chain chain = by_hand.clone();
      const shard::Options options{.layout = layout, .backward_prefetch = shard::BackwardPrefetch::post(2)};
      for (Link& link : chain.links) shard::fully_shard(link, options);
      shard::fully_shard(chain, options);
      if (named)
        for (const std::size_t i : {2, 4}) {
          shard::set_modules_to_backward_prefetch(chain.links[i], {&chain.links[0], &chain.links[1]});
          shard::set_modules_to_forward_prefetch(chain.links[i - 2], {&chain.links[4], &chain.links[i]});
        }
      expect_any_mixture(world, chain, by_hand);
    }
  });
}

TEST_CASE("only a sharded module is unsharded") {
  nn::Linear plain(3, 3);
  CHECK_THROWS_AS(shard::unshard(plain), StateError);
}
