// Optimizers that step groups while the backward goes on: when that is, and what could read a stepped group
// again.
#include "shard/step_in_backward.h"

#include <array>

#include "collectives/dry_run.h"
#include "nn/grad_scaler.h"
#include "tests/message_of.h"
#include "tests/sanitizer.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

using shard::GroupLayout, shard::ShardingStrategy;
using enum shard::ShardingStrategy;

/// Plain descent that says when it steps.
struct Noting final : nn::Optimizer {
  std::function<void()> stepped;
  explicit Noting(std::vector<nn::Parameter> params)
      : Optimizer({nn::ParamGroup{std::move(params)}}, {{"lr", 0.5}}) {}
  std::vector<std::string> state_names() const override { return {}; }
  Slots fresh(const Tensor&) const override { return {}; }
  void step_group(const Group&, std::span<const nn::Parameter> params, std::span<Slots* const>) override {
    if (stepped) stepped();
    for (const nn::Parameter& p : params) sub_(p.local().detach(), mul(p.grad(), 0.5));
  }
};

/// Runs `body(world, options, copied)` on worlds of 1 to 4, in both layouts and all strategies, on one device
/// and on two, in one precision and in two. `copied`: what is computed with lies beside the shard.
template <class F>
void on_all(F&& body) {
  for (const int ranks : worlds())
    for (const GroupLayout layout : {GroupLayout::per_parameter, GroupLayout::flat})
      for (const ShardingStrategy strategy : {full_shard, shard_grad_op, zero1, no_shard})
        for (const bool offloaded : {false, true})
          for (const bool mixed : {false, true}) {
            INFO(ranks << " ranks, layout " << int(layout) << ", strategy " << int(strategy) << ", offloaded "
                       << offloaded << ", mixed " << mixed);
            shard::Options options{.layout = layout, .strategy = strategy};
            if (offloaded) options.compute_device = Device::cpu(1);
            if (mixed) options.mixed_precision.param_dtype = bf16;
            const bool copied = offloaded || (ranks > 1 && strategy != no_shard);
            CHECK_NOTHROW(run_ranks(ranks, [&](World& world) { body(world, options, copied); }));
          }
}

/// x -> x W -> Linear(x W), in which the first W is no part of what is trained.
struct Twice final : nn::Layer<Twice> {
  nn::Linear linear{5, 5};
  Tensor forward(const Tensor& x) const { return linear(matmul(x, linear.weight.tensor().detach())); }
  void visit(auto&& on) { on("linear", linear); }
};

/// A hook may act when the gradient comes to the layers' input, and one when it comes to the first's bias.
struct Pair final : nn::Layer<Pair> {
  nn::Linear first{5, 5};
  Twice a, b;
  std::function<void()> behind;
  Tensor forward(const Tensor& x) {
    const Tensor y = first(x);
    if (behind)
      register_hook(y, [act = behind](const Tensor&) {
        act();
        return Tensor{};
      }).keep();
    return b(a(y));
  }
  void visit(auto&& on) {
    on("first", first);
    on("a", a);
    on("b", b);
  }
};

void shard_all(Pair& net, const shard::Options& options) {
  for (Twice* m : {&net.a, &net.b}) shard::fully_shard(*m, options);
  shard::fully_shard(net, options);
}

Tensor loss_of(Pair& net, int rank, int step) {
  return mean(square(to(net(batch_of(rank, step, 5).x), f32)));
}

/// What `act` throws, or nothing.
template <class F>
std::string error_of(F&& act) {
  try {
    act();
  } catch (const StateError& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("a group is stepped before the next one is reduced, an offloaded one before the one after") {
  for (const GroupLayout layout : {GroupLayout::per_parameter, GroupLayout::flat})
    for (const bool offloaded : {false, true}) {
      DryRun run({.size = 3, .done = DryRunOptions::Done::always});
      Net net;
      shard::Options options{.mesh = run.world().mesh(), .layout = layout};
      if (offloaded) options.compute_device = Device::cpu(1);
      shard_blocks_and_rest(net, options);
      Noting noting(net.parameters());
      const shard::StepInBackward scope(noting);
      for (nn::Parameter& p : net.parameters()) p.set_grad(zeros_like(p.local()));  // no peer brings any
      if (layout == GroupLayout::flat && offloaded) noting.zero_grad(nn::ZeroGrad::to_zero);
      const Tensor loss = loss_at(net, 0, 0);
      std::size_t from = run.steps().size();
      std::string order;
      const auto note = [&] {
        for (; from < run.steps().size(); ++from)
          if (const DryStep& step = run.steps()[from];
              step.kind == DryStep::Kind::post && step.call == CollectiveKind::reduce_scatter)
            order += fmt::format("reduce {}, ", step.label);
      };
      noting.stepped = [&] {
        note();
        order += "step, ";
      };
      loss.backward();
      CHECK(order ==
            (offloaded ? "reduce blocks.2, reduce blocks.1, step, reduce blocks.0, step, reduce root, step, "
                         "step, "
                       : "reduce blocks.2, step, reduce blocks.1, step, reduce blocks.0, step, reduce root, "
                         "step, "));
    }
}

TEST_CASE("what all ranks have come to is stepped while the backward goes on") {
  on_all([](World& world, const shard::Options& options, bool copied) {
    Net net(NetOptions{.uneven = true});
    shard_blocks_and_rest(net, options);
    Noting noting(net.parameters());
    int steps = 0, within = -1;
    noting.stepped = [&] { ++steps; };
    const shard::StepInBackward scope(noting);
    const Subscription meet = register_hook(net.embed.weight.object().tensor(), [&](const Tensor&) {
      world.group().barrier();
      return Tensor{};
    });
    const Subscription look = register_hook(net.embed.bias.object().tensor(), [&](const Tensor&) {
      within = steps;
      return Tensor{};
    });
    loss_at(net, world.rank(), 0).backward();
    expect(steps == 4, "{} steps of four groups", steps);
    const bool at_end = !copied || options.strategy == zero1;  // which reduces there
    const int expected = at_end ? 0 : options.compute_device ? 2 : 3;
    expect(within == expected, "{} steps within the walk, not {}", within, expected);
  });
}

TEST_CASE("a group is stepped when the graph reads it no more, to the bits of a step at the end") {
  on_all([](World& world, const shard::Options& options, bool) {
    const auto train = [&](bool early) {
      manual_seed(3);
      Pair net;
      shard_all(net, options);
      nn::Adam adam(net.parameters(), {.lr = 1e-2});
      std::optional<shard::StepInBackward> scope;
      if (early) scope.emplace(adam);
      for (int step = 0; step < 3; ++step) {
        adam.zero_grad();
        loss_of(net, world.rank(), step).backward();
        if (!early) adam.step();
      }
      return shard::full_state_dict(net);
    };
    const nn::StateDict found = train(true), expected = train(false);
    for (std::size_t i = 0; i < expected.size(); ++i)
      expect(found[i].second.to_vector<float>() == expected[i].second.to_vector<float>(), "'{}' differs",
             expected[i].first);
  });
}

namespace {

/// A unit of two groups: the last one's gradients are complete while the first one is still read.
struct Scaled final : nn::Layer<Scaled> {
  nn::Param first{ones({5})}, second{ones({5})};
  nn::Linear linear{5, 5};
  Tensor forward(const Tensor& x) const {
    const Tensor y = mul(mul(x, first.tensor()), second.tensor());
    return sherd::to(linear(sherd::to(y, linear.weight.tensor().dtype())), f32);
  }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
    on("linear", linear);
  }
};

struct Wrapped final : nn::Layer<Wrapped> {
  nn::Linear before{5, 5};
  Scaled inner;
  Tensor forward(const Tensor& x) const { return inner(before(x)); }
  void visit(auto&& on) {
    on("before", before);
    on("inner", inner);
  }
};

}  // namespace

TEST_CASE("a unit's group that is stepped leaves the unit's other groups to the graph") {
  on_all([](World& world, const shard::Options& given, bool) {
    shard::Options options = given;
    options.mixed_precision = {};
    options.mixed_precision.param_dtype_override = [](const std::string& name, const nn::Parameter&) {
      return name.find("linear") == std::string::npos ? std::nullopt : std::optional(bf16);
    };
    const auto train = [&](bool early) {
      manual_seed(3);
      Wrapped net;
      shard::fully_shard(net.inner, options);
      shard::Options outer = options;
      outer.mixed_precision = {};
      shard::fully_shard(net, outer);
      nn::Adam adam(net.parameters(), {.lr = 1e-2});
      std::optional<shard::StepInBackward> scope;
      if (early) scope.emplace(adam);
      for (int step = 0; step < 2; ++step) {
        adam.zero_grad();
        mean(square(net(batch_of(world.rank(), step, 5).x))).backward();
        if (!early) adam.step();
      }
      return shard::full_state_dict(net);
    };
    const nn::StateDict found = train(true), expected = train(false);
    for (std::size_t i = 0; i < expected.size(); ++i)
      expect(found[i].second.to_vector<float>() == expected[i].second.to_vector<float>(), "'{}' differs",
             expected[i].first);
  });
}

TEST_CASE("what a backward may have stepped is not gathered again in it") {
  constexpr std::string_view refusal = "is read again when its gradient is complete, and it is stepped";
  on_all([&](World& world, const shard::Options& options, bool copied) {
    if (options.strategy == zero1 || options.strategy == no_shard) return;  // keep what they gathered
    for (const bool graph : {false, true})
      for (const bool early : {false, true}) {
        manual_seed(3);
        Pair net;
        shard_all(net, options);
        Noting noting(net.parameters());
        std::optional<shard::StepInBackward> scope;
        if (early) scope.emplace(noting);
        Tensor x =
            ones({2, 5}, {net.b.linear.weight.tensor().dtype(), net.b.linear.weight.tensor().device()});
        x.requires_grad_();
        net.set_requires_grad(false);
        const Tensor recorded = sum(net(x));  // by a forward that this backward does not come to
        net.set_requires_grad(true);
        shard::reshard(net);  // what is kept would be held, with the values from before the step
        int came = 0;
        net.behind = [&] {
          ++came;
          if (graph)
            grad(recorded, std::array{x});
          else
            mean(net.b.linear.weight.tensor().detach());
        };
        const Tensor loss = loss_of(net, world.rank(), 0);
        const std::string error = error_of([&] { loss.backward(); });
        expect(came == 1, "the hook ran {} times", came);
        expect(has(error, refusal) == (early && copied), "{}: '{}'", early ? "early" : "at the end", error);
        if (early && copied) expect(has(error, "'linear.weight'"), "{}", error);
      }
  });
}

TEST_CASE("what a backward keeps shows the values from before its steps, until it is over") {
  on_all([&](World& world, const shard::Options& options, bool copied) {
    if (!copied) return;
    Pair net;
    shard_all(net, options);
    shard::set_reshard_after_backward(net, false);
    Noting noting(net.parameters());
    std::vector<double> seen, before;
    net.behind = [&] {
      seen = to(clone(net.b.linear.weight.tensor().detach()), f64).to_vector<double>();
      world.group().barrier();
    };
    const shard::StepInBackward scope(noting);
    for (int step = 0; step < 2; ++step) {
      noting.zero_grad();
      {
        const NoGrad guard;
        before = to(clone(net.b.linear.weight.tensor()), f64).to_vector<double>();
      }
      loss_of(net, world.rank(), step).backward();
      expect(seen == before, "another value within the backward");
      const NoGrad guard;
      const Tensor after = clone(net.b.linear.weight.tensor());
      expect(to(after, f64).to_vector<double>() != before, "nothing was stepped");
    }
  });
}

TEST_CASE("a group that an optimizer is given within the scope is stepped in backwards too") {
  on_ranks([](World& world, GroupLayout layout) {
    manual_seed(3);
    Pair net;
    shard_all(net, {.layout = layout});
    nn::Linear plain(5, 5);
    const std::vector<nn::Parameter> all = net.parameters();
    nn::Sgd sgd(std::vector<nn::Parameter>{all[0]}, {.lr = 0.1});
    const shard::StepInBackward scope(sgd);
    sgd.add_param_group({std::vector<nn::Parameter>(all.begin() + 1, all.end())});
    const auto parts = [&] {
      std::vector<std::vector<double>> values;
      for (const nn::Parameter& p : all) values.push_back(to(p.local().detach(), f64).to_vector<double>());
      return values;
    };
    const auto before = parts();
    loss_of(net, world.rank(), 0).backward();
    const auto after = parts();
    for (std::size_t i = 0; i < all.size(); ++i)
      expect(all[i].local().numel() == 0 || after[i] != before[i], "parameter {} was not stepped", i);
    for (const auto& act : std::initializer_list<std::function<void()>>{
             [&] { nn::Sgd(all).step(); }, [&] { shard::clip_grad_norm_({&all[1], 1}, 1.0); },
             [&] { nn::clip_grads_with_norm_({&all[1], 1}, 1.0, ones({})); },
             [&] {
               nn::GradScaler scaler;
               scaler.scale(ones({}));
               scaler.unscale_(sgd);
             }})
      expect(has(error_of(act), "stepped within backwards"), "'{}'", error_of(act));
    expect(parts() == after, "what was refused changed something");
    sgd.add_param_group({{plain.weight.object()}});
    const std::string error = message_of<ValueError>([&] { loss_of(net, world.rank(), 1).backward(); });
    expect(has(error, "is not sharded"), "'{}'", error);
    expect(parts() == after, "the backward stepped something");
  });
}

TEST_CASE("a backward within the scope of an optimizer that is gone is refused, and those after it go on") {
  on_ranks([](World& world, GroupLayout layout) {
    manual_seed(3);
    Pair net;
    shard_all(net, {.layout = layout});
    {
      auto sgd = std::make_unique<nn::Sgd>(net.parameters(), nn::SgdOptions{.lr = 0.1});
      const shard::StepInBackward scope(*sgd);
      sgd.reset();
      const std::string error = message_of<StateError>([&] { loss_of(net, world.rank(), 0).backward(); });
      expect(has(error, "its optimizer is gone"), "'{}'", error);
      nn::Sgd(net.parameters(), {.lr = 0.1}).step();
    }
    loss_of(net, world.rank(), 0).backward();
    expect(net.parameters()[0].grad().defined() || net.parameters()[0].local().numel() == 0, "no gradient");
  });
}

TEST_CASE("an optimizer where one was that died in its scope has a scope of its own") {
  on_ranks([](World& world, GroupLayout layout) {
    manual_seed(3);
    Pair net;
    shard_all(net, {.layout = layout});
    std::optional<nn::Sgd> sgd(std::in_place, net.parameters(), nn::SgdOptions{.lr = 0.1});
    auto of_dead = std::make_unique<shard::StepInBackward>(*sgd);
    sgd.emplace(net.parameters(), nn::SgdOptions{.lr = 0.1});  // at its address
    const shard::StepInBackward scope(*sgd);
    of_dead.reset();
    const auto before = net.parameters()[0].local().detach().to_vector<float>();
    loss_of(net, world.rank(), 0).backward();
    expect(before.empty() || net.parameters()[0].local().detach().to_vector<float>() != before,
           "the scope of the new optimizer ended with the dead one's");
  });
}

TEST_CASE("a step within a backward neither calls nor gathers, and its scope lies around backwards") {
  on_ranks([](World& world, GroupLayout layout) {
    const auto refuses = [&](std::string_view text, const auto& prepare) {
      manual_seed(3);
      Pair net;
      shard_all(net, {.layout = layout});
      Noting noting(net.parameters());
      std::optional<shard::StepInBackward> scope;
      prepare(net, noting, scope);
      const std::string error = error_of([&] { loss_of(net, world.rank(), 0).backward(); });
      expect(has(error, text), "'{}' in place of '{}'", error, text);
      noting.stepped = {};
      net.behind = {};
      scope.reset();
      noting.zero_grad();
      loss_of(net, world.rank(), 1).backward();
      noting.step();
    };
    using Scope = std::optional<shard::StepInBackward>;
    refuses("an optimizer's step makes a call among ranks", [&](Pair&, Noting& noting, Scope& scope) {
      noting.stepped = [&] { world.group().barrier(); };
      scope.emplace(noting);
    });
    refuses("an optimizer's step reads the whole 'linear.weight'",
            [&](Pair& net, Noting& noting, Scope& scope) {
              noting.stepped = [&] { mean(net.b.linear.weight.tensor()); };
              scope.emplace(noting);
            });
    refuses("a scope begins within a backward",
            [&](Pair& net, Noting& noting, Scope& scope) { net.behind = [&] { scope.emplace(noting); }; });
    refuses("a scope ended within a backward", [&](Pair& net, Noting& noting, Scope& scope) {
      scope.emplace(noting);
      net.behind = [&] { scope.reset(); };
    });
  });
}
