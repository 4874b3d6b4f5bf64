// Shards, gradients and optimizer state on one device, computing on another; and optimizers that step within
// the backward.
#include <array>

#include "collectives/dry_run.h"
#include "nn/grad_scaler.h"
#include "shard/fsdp.h"
#include "shard/step_in_backward.h"
#include "tests/late_device.h"
#include "tests/sanitizer.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

using shard::GroupLayout, shard::ShardingStrategy;
using enum shard::ShardingStrategy;

const Device home = Device::cpu(0), away = Device::cpu(1);
constexpr std::array layouts = {GroupLayout::per_parameter, GroupLayout::flat};
constexpr std::array strategies = {full_shard, shard_grad_op, zero1, no_shard};

/// Runs `body(world, options)` on worlds of 1 to 4, in both layouts and all strategies.
template <class F>
void on_all(F&& body) {
  for (const int ranks : worlds())
    for (const GroupLayout layout : layouts)
      for (const ShardingStrategy strategy : strategies) {
        INFO(ranks << " ranks, layout " << int(layout) << ", strategy " << int(strategy));
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          body(world, shard::Options{.layout = layout, .strategy = strategy});
        }));
      }
}

using Wrap = std::function<void(Net&)>;
using MakeOptimizers = std::function<std::vector<std::unique_ptr<nn::Optimizer>>(nn::Module&)>;

template <class Optimizer, class Options>
MakeOptimizers one(Options options) {
  return [options](nn::Module& net) {
    std::vector<std::unique_ptr<nn::Optimizer>> made;
    made.push_back(std::make_unique<Optimizer>(net.parameters(), options));
    return made;
  };
}

/// What a training came to, as numbers on the host.
struct Outcome {
  std::vector<float> losses;
  std::vector<Gradients> gradients;
  std::vector<std::pair<std::string, std::vector<double>>> values;  ///< of the model, then of its optimizers
};

void note(std::vector<std::pair<std::string, std::vector<double>>>& values, const nn::StateDict& state) {
  for (const auto& [name, tensor] : state) values.emplace_back(name, to(tensor, f64).to_vector<double>());
}

enum class When { after_backward, in_backward };

/// Four steps: a plain one, one after a backward without synchronisation, one of two averages if `twice`, and
/// a plain one. Gradients, parts and state are at `home`.
Outcome train(World& world, const Wrap& wrap, const MakeOptimizers& make, When when, bool twice,
              Device home = ::home) {
  Outcome outcome;
  Net net(NetOptions{.uneven = true});
  wrap(net);
  const auto optimizers = make(net);
  std::vector<std::unique_ptr<shard::StepInBackward>> scopes;
  if (when == When::in_backward)
    for (const auto& optimizer : optimizers)
      scopes.push_back(std::make_unique<shard::StepInBackward>(*optimizer));
  const auto average = [&](int step) {
    const Tensor loss = loss_at(net, world.rank(), step);
    outcome.losses.push_back(loss.item<float>());
    loss.backward();
    for (const nn::Parameter& p : net.parameters()) {
      expect(p.local().device() == home, "a part is on {}", to_string(p.local().device()));
      expect(!p.grad().defined() || p.grad().device() == home, "an average is not at home");
    }
    outcome.gradients.push_back(gradients(net));
    if (when == When::after_backward)
      for (const auto& optimizer : optimizers) optimizer->step();
  };
  for (int step = 0; step < 4; ++step) {
    for (const auto& optimizer : optimizers) optimizer->zero_grad();
    if (step == 1) {
      const shard::NoSync scope = shard::no_sync(net);
      loss_at(net, world.rank(), 10).backward();
    }
    average(step);
    if (step == 2 && twice) average(11);
  }
  note(outcome.values, shard::full_state_dict(net));
  for (const auto& optimizer : optimizers) {
    for (const auto& [name, tensor] : optimizer->state_dict())
      expect(tensor.device() == home || name.starts_with("group."), "'{}' is on {}", name,
             to_string(tensor.device()));
    note(outcome.values, optimizer->state_dict());
  }
  return outcome;
}

void expect_same(const Outcome& found, const Outcome& expected, std::string_view what) {
  expect(found.losses == expected.losses, "{}: other losses", what);
  expect(found.gradients == expected.gradients, "{}: other gradients", what);
  expect(found.values.size() == expected.values.size(), "{}: {} values", what, found.values.size());
  for (std::size_t i = 0; i < found.values.size(); ++i)
    expect(found.values[i] == expected.values[i], "{}: '{}' differs", what, expected.values[i].first);
}

Wrap in_blocks(shard::Options options) {
  return [options](Net& net) { shard_blocks_and_rest(net, options); };
}

}  // namespace

TEST_CASE("offloaded shards train to the bits of those that are where they compute", "[threads meet]") {
  const auto adam = one<nn::AdamW>(nn::AdamWOptions{.lr = 1e-2});
  on_all([&](World& world, shard::Options options) {
    for (const auto& mixed : {shard::MixedPrecisionPolicy{},
                              shard::MixedPrecisionPolicy{.param_dtype = bf16, .reduce_dtype = f32}}) {
      options.mixed_precision = mixed;
      const bool twice = options.layout == GroupLayout::per_parameter;
      const Outcome expected = train(world, in_blocks(options), adam, When::after_backward, twice);
      shard::Options offloaded = options;
      offloaded.device = away;
      offloaded.cpu_offload = true;
      expect_same(train(world, in_blocks(offloaded), adam, When::after_backward, twice), expected,
                  "offloaded");
      shard::Options split = options;
      split.compute_device = away;
      expect_same(train(world, in_blocks(split), adam, When::after_backward, twice), expected, "two devices");
      if (options.strategy != full_shard || world.size() != 4) continue;
      for (shard::Options* o : {&options, &offloaded}) o->reshard_after_forward = 2;
      expect_same(train(world, in_blocks(offloaded), adam, When::after_backward, twice), expected,
                  "by pairs");
      for (shard::Options* o : {&options, &offloaded}) o->mesh = world.mesh({2, 2}, {"replica", "shard"});
      for (shard::Options* o : {&options, &offloaded}) o->reshard_after_forward = true;
      expect_same(train(world, in_blocks(offloaded), adam, When::after_backward, twice),
                  train(world, in_blocks(options), adam, When::after_backward, twice), "hybrid");
    }
  });
}

TEST_CASE("an offloaded average comes down while the backward goes on") {
  for (const GroupLayout layout : layouts) {
    DryRun run({.size = 3, .done = DryRunOptions::Done::always});
    Net net;
    shard_blocks_and_rest(net, {.mesh = run.world().mesh(), .layout = layout, .compute_device = away});
    const Tensor loss = loss_at(net, 0, 0);
    const std::size_t from = run.steps().size();
    loss.backward();
    std::string order;
    for (std::size_t i = from; i < run.steps().size(); ++i)
      if (const DryStep& step = run.steps()[i]; step.call == CollectiveKind::reduce_scatter)
        order += fmt::format("{} {}, ", step.kind == DryStep::Kind::post ? "reduce" : "wait", step.label);
    CHECK(order ==
          "reduce blocks.2, wait blocks.2, reduce blocks.1, wait blocks.1, reduce blocks.0, wait blocks.0, "
          "reduce root, wait root, ");
  }
}

TEST_CASE("FullyShardedDataParallel offloads, whether it shows one flat parameter or the originals") {
  const auto adam = one<nn::Adam>(nn::AdamOptions{.lr = 1e-2});
  for (const int ranks : {1, 2, 3})
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      for (const ShardingStrategy strategy : {full_shard, shard_grad_op, no_shard})
        for (const bool originals : {false, true}) {
          shard::FsdpOptions options{.strategy = strategy,
                                     .auto_wrap = shard::wrap_classes({"Block"}),
                                     .use_orig_params = originals};
          const auto wrap = [&](Net& net) { const shard::FullyShardedDataParallel handle(net, options); };
          const Outcome expected = train(world, wrap, adam, When::after_backward, false);
          options.device = away;
          options.cpu_offload = true;
          expect_same(train(world, wrap, adam, When::after_backward, false), expected, "offloaded");
          expect_same(train(world, wrap, adam, When::in_backward, false), expected, "and stepped early");
        }
    }));
}

TEST_CASE("what computes on one device and is kept on another is said by devices or in one word") {
  nn::Linear layer(2, 2);
  CHECK_THROWS_WITH(
      shard::fully_shard(layer, {.cpu_offload = true}),
      "fully_shard: cpu_offload keeps shards on cpu:0 and computes on `device`, which is not given");
  CHECK_THROWS_WITH(shard::fully_shard(layer, {.device = away, .cpu_offload = true, .compute_device = home}),
                    "fully_shard: cpu_offload computes on `device`, cpu:1, and compute_device is given too, "
                    "cpu:0; leave one "
                    "out");
}

TEST_CASE("averages of two backwards add up, but for offloaded flat parameters, which refuse the second") {
  on_all([&](World& world, shard::Options options) {
    options.compute_device = away;
    Net net(NetOptions{.uneven = true});
    shard_blocks_and_rest(net, options);
    nn::Adam adam(net.parameters());
    loss_at(net, world.rank(), 0).backward();
    const Gradients first = gradients(net);
    if (options.layout == GroupLayout::per_parameter) {
      loss_at(net, world.rank(), 1).backward();
      const Gradients both = gradients(net);
      adam.zero_grad();
      loss_at(net, world.rank(), 1).backward();
      expect(both == plus(first, gradients(net)), "the sum of both");
      return;
    }
    const auto refused = [&] {
      try {
        loss_at(net, world.rank(), 1).backward();
      } catch (const StateError& error) {
        expect(std::string_view(error.what()).find("the flat layout does not add another one") !=
                   std::string_view::npos,
               "{}", error.what());
        return true;
      }
      return false;
    };
    expect(refused(), "the second average");
    expect(gradients(net) == first, "the first one is not what it was");
    {
      const shard::NoSync scope = shard::no_sync(net);
      loss_at(net, world.rank(), 2).backward();
    }
    expect(refused(), "an average from before no_sync");
    adam.zero_grad(nn::ZeroGrad::to_zero);
    loss_at(net, world.rank(), 0).backward();
    expect(gradients(net) == first, "onto zeros");
    for (nn::Parameter& p : net.parameters()) p.set_grad({});
    loss_at(net, world.rank(), 0).backward();
    expect(gradients(net) == first, "onto none");
    adam.zero_grad(nn::ZeroGrad::to_zero);
    loss_at(net, world.rank(), 0).backward();
    expect(gradients(net) == first, "onto zeros in an average's place");
    expect(refused(), "what came onto zeros is an average");
  });
}

// ---- steps within backwards ----

namespace {

/// Two optimizers: one of every other parameter, and one in two groups with rates of their own.
std::vector<std::unique_ptr<nn::Optimizer>> several(nn::Module& net) {
  std::vector<std::vector<nn::Parameter>> parts(3);
  std::size_t next = 0;
  for (const nn::Parameter& p : net.parameters()) parts[next++ % 3].push_back(p);
  std::vector<std::unique_ptr<nn::Optimizer>> made;
  made.push_back(std::make_unique<nn::Sgd>(parts[0], nn::SgdOptions{.lr = 1e-2, .momentum = 0.9}));
  made.push_back(std::make_unique<nn::AdamW>(
      std::vector<nn::ParamGroup>{{.params = parts[1]},
                                  {.params = parts[2], .lr = 3e-3, .weight_decay = 0.0}},
      nn::AdamWOptions{.lr = 1e-2}));
  return made;
}

/// A communication hook: sums, in place where there are replicas, and a division of its own.
void summed_and_halved(const Tensor& gradient, const Tensor& result, const Group& group) {
  if (&gradient.storage() == &result.storage())
    group.all_reduce(result, ReduceOp::sum());
  else
    group.reduce_scatter(result, gradient, ReduceOp::sum());
  mul_(result, 0.5);
}

}  // namespace

TEST_CASE("steps within the backward come to the bits of steps after it", "[threads meet]") {
  const std::vector<std::pair<const char*, MakeOptimizers>> makers = {
      {"AdamW", one<nn::AdamW>(nn::AdamWOptions{.lr = 1e-2})},
      {"SGD", one<nn::Sgd>(nn::SgdOptions{.lr = 1e-2})},
      {"RMSprop", one<nn::Rmsprop>(nn::RmspropOptions{.lr = 1e-2, .momentum = 0.9, .centered = true})},
      {"SGD with momentum, one by one",
       one<nn::Sgd>(nn::SgdOptions{.lr = 1e-2, .momentum = 0.9, .foreach = false})},
      {"two", several}};
  on_all([&](World& world, shard::Options options) {
    for (const bool offloaded : {false, true}) {
      if (offloaded) options.compute_device = away;
      for (const auto& [name, make] : makers) {
        const bool twice = !offloaded || options.layout == GroupLayout::per_parameter;
        expect_same(train(world, in_blocks(options), make, When::in_backward, twice),
                    train(world, in_blocks(options), make, When::after_backward, twice), name);
      }
      const auto compare = [&](const Wrap& wrap, std::string_view what) {
        const auto adam = one<nn::AdamW>(nn::AdamWOptions{.lr = 1e-2});
        expect_same(train(world, wrap, adam, When::in_backward, false),
                    train(world, wrap, adam, When::after_backward, false), what);
      };
      compare(
          [&](Net& net) {
            shard_blocks_and_rest(net, options);
            shard::set_reshard_after_backward(net, false);
          },
          "kept after backwards");
      compare(
          [&](Net& net) {
            shard_blocks_and_rest(net, options);
            shard::register_comm_hook(net, summed_and_halved);
          },
          "with a hook in place of reductions");
      if (world.size() == 4 && options.strategy == full_shard) {
        shard::Options ways = options;
        ways.reshard_after_forward = 2;
        compare(in_blocks(ways), "slices");
        ways.reshard_after_forward = true;
        ways.mesh = world.mesh({2, 2}, {"replica", "shard"});
        compare(in_blocks(ways), "replicas");
      }
      const auto masters = one<nn::Adam>(nn::AdamOptions{.lr = 1e-2, .masters = nn::Masters::in_f32});
      shard::Options computing_in_16 = options;
      computing_in_16.mixed_precision.param_dtype = bf16;
      const Wrap in_16_bits = [&](Net& net) {
        net.to(bf16);
        shard_blocks_and_rest(net, computing_in_16);
      };
      expect_same(train(world, in_16_bits, masters, When::in_backward, false),
                  train(world, in_16_bits, masters, When::after_backward, false), "masters");
    }
  });
}

namespace {

/// Says whom it steps.
struct Noting final : nn::Optimizer {
  std::function<void(std::size_t)> stepped;
  explicit Noting(std::vector<nn::Parameter> params)
      : Optimizer({nn::ParamGroup{std::move(params)}}, {{"lr", 0.5}}) {}
  std::vector<std::string> state_names() const override { return {}; }
  Slots fresh(const Tensor&) const override { return {}; }
  void step_group(const Group&, std::span<const nn::Parameter> params, std::span<Slots* const>) override {
    if (stepped) stepped(params.size());
    for (const nn::Parameter& p : params) sub_(p.local().detach(), mul(p.grad(), 0.5));
  }
};

}  // namespace

TEST_CASE("a group is stepped when its average is there, before the next one's is waited for") {
  for (const GroupLayout layout : layouts) {
    DryRun run({.size = 3});
    Net net;
    shard_blocks_and_rest(net, {.mesh = run.world().mesh(), .layout = layout});
    Noting noting(net.parameters());
    const shard::StepInBackward scope(noting);
    for (nn::Parameter& p : net.parameters()) p.set_grad(zeros_like(p.local()));  // no peer brings any
    const Tensor loss = loss_at(net, 0, 0);
    std::size_t from = run.steps().size();
    std::string order;
    noting.stepped = [&](std::size_t) {
      for (; from < run.steps().size(); ++from)
        if (const DryStep& step = run.steps()[from];
            step.kind == DryStep::Kind::wait && step.call == CollectiveKind::reduce_scatter)
          order += fmt::format("wait {}, ", step.label);
      order += "step, ";
    };
    loss.backward();
    CHECK(order == "wait blocks.2, step, wait blocks.1, step, wait blocks.0, step, wait root, step, ");
  }
}

TEST_CASE("hooks after accumulation see the average at the end of a backward that stepped") {
  on_ranks([&](World& world, GroupLayout layout) {
    Net net(NetOptions{.uneven = true});
    shard_blocks_and_rest(net, {.layout = layout});
    Noting noting(net.parameters());
    std::vector<std::string> order;
    noting.stepped = [&](std::size_t) { order.push_back("step"); };
    std::vector<Subscription> hooks;
    const nn::Parameter weight = net.blocks[1].in.weight.object();
    hooks.push_back(register_post_accumulate_hook(
        weight.local(), [&](Leaf& leaf) { order.push_back(leaf.grad.defined() ? "hook" : "too early"); }));
    const shard::StepInBackward scope(noting);
    loss_at(net, world.rank(), 0).backward();
    std::vector<std::string> expected(4, "step");
    if (weight.grad().defined()) expected.emplace_back("hook");  // else this rank has no part
    expect(order == expected, "{} in all", order.size());
  });
}

TEST_CASE("gradients that are this rank's own are not stepped within backwards") {
  on_ranks([&](World& world, GroupLayout layout) {
    Net net(NetOptions{.uneven = true});
    shard_blocks_and_rest(net, {.layout = layout});
    Noting noting(net.parameters());
    const nn::StateDict before = shard::full_state_dict(net);
    int steps = 0;
    noting.stepped = [&](std::size_t) { ++steps; };
    const shard::StepInBackward scope(noting);
    {
      const shard::NoSync unsynchronised = shard::no_sync(net);
      loss_at(net, world.rank(), 0).backward();
    }
    expect(steps == 0, "{} steps of own gradients", steps);
    shard::set_requires_gradient_sync(net.blocks[0], false);
    loss_at(net, world.rank(), 1).backward();
    expect(steps == 3, "{} steps of three averages", steps);
    shard::set_requires_gradient_sync(net.blocks[0], true);
    noting.zero_grad();
    loss_at(net, world.rank(), 1).backward();
    expect(steps == 7, "{} steps", steps);
  });
}

TEST_CASE("between an average and its step within the backward nothing can come") {
  on_ranks([&](World& world, GroupLayout layout) {
    Net net(NetOptions{.uneven = true});
    shard_blocks_and_rest(net, {.layout = layout});
    nn::Adam adam(net.parameters()), other(net.parameters());
    const auto refuses = [](std::string_view what, const auto& act, std::string_view text) {
      try {
        act();
      } catch (const Error& error) {
        expect(std::string_view(error.what()).find(text) != std::string_view::npos, "{}: {}", what,
               error.what());
        return;
      }
      expect(false, "{} is not refused", what);
    };
    nn::GradScaler scaler;
    {
      const shard::StepInBackward scope(adam);
      scaler.scale(loss_at(net, world.rank(), 0)).backward();
      constexpr std::string_view text = "is stepped within backwards (StepInBackward)";
      const nn::StateDict before = shard::full_state_dict(net);
      refuses("a step", [&] { adam.step(); }, text);
      refuses("another's step", [&] { other.step(); }, text);
      refuses("a scaler's step", [&] { scaler.step(adam); }, text);
      refuses("clipping", [&] { shard::clip_grad_norm_(net.parameters(), 1); }, text);
      refuses(
          "a second scope", [&] { const shard::StepInBackward again(adam); },
          "steps within backwards already");
      const nn::StateDict after = shard::full_state_dict(net);
      for (std::size_t i = 0; i < before.size(); ++i)
        expect(before[i].second.to_vector<float>() == after[i].second.to_vector<float>(), "'{}' was stepped",
               before[i].first);
    }
    shard::clip_grad_norm_(net.parameters(), 1);
    adam.step();
    other.step();
    nn::Linear whole(2, 2);
    nn::Adam of_whole(whole.parameters());
    refuses("an unsharded parameter", [&] { const shard::StepInBackward scope(of_whole); }, "is not sharded");
  });
}

TEST_CASE("an optimizer that throws within a backward leaves the next one as it would be") {
  on_ranks([&](World& world, GroupLayout layout) {
    Net net(NetOptions{.uneven = true}), by_hand(NetOptions{.uneven = true});
    shard_blocks_and_rest(net, {.layout = layout});
    Noting noting(net.parameters());
    bool thrown = false;
    {
      const shard::StepInBackward scope(noting);
      noting.stepped = [](std::size_t) { throw std::runtime_error("no"); };
      try {
        loss_at(net, world.rank(), 0).backward();
      } catch (const std::runtime_error&) {
        thrown = true;
      }
    }
    expect(thrown, "it passed");
    noting.stepped = {};
    noting.zero_grad();
    loss_at(net, world.rank(), 1).backward();
    expect_gradients(net, world, plain(by_hand, world, 1), "after it");
    noting.step();
  });
}

TEST_CASE("averages of a device that works late come down as they are", "[threads meet]") {
  // Of ops that have kernels there: elementwise ones.
  const MakeOptimizers make = [](nn::Module& net) {
    std::vector<std::unique_ptr<nn::Optimizer>> made;
    made.push_back(std::make_unique<Noting>(net.parameters()));
    return made;
  };
  on_all([&](World& world, shard::Options options) {
    for (const auto& mixed : {shard::MixedPrecisionPolicy{},
                              shard::MixedPrecisionPolicy{.param_dtype = bf16, .reduce_dtype = f32}}) {
      options.mixed_precision = mixed;
      shard::Options kept = options, offloaded = options;
      kept.device = offloaded.compute_device = late_device();
      const bool twice = options.layout == GroupLayout::per_parameter;
      const auto compare = [&](When when) {
        expect_same(train(world, in_blocks(offloaded), make, when, twice),
                    train(world, in_blocks(kept), make, when, twice, late_device()), "late");
      };
      for (const When when : {When::after_backward, When::in_backward}) compare(when);
      if (options.strategy != full_shard || world.size() != 4) continue;
      for (shard::Options* o : {&kept, &offloaded}) o->mesh = world.mesh({2, 2}, {"replica", "shard"});
      compare(When::in_backward);
    }
  });
}
