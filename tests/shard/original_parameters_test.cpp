// Parameters of a sharded module as the user's own: what they show in every state, and that optimizers over
// them, made at any time, do what they do to a net that is not sharded.
#include <sherd.h>

#include <map>
#include <optional>

#include "shard/data_parallel.h"
#include "shard/summon.h"
#include "tests/shard/originals.h"

using namespace sherd;
using namespace sherd::test;

namespace {

// ---- what they show ----

/// Looks at a unit's own parameters while it runs.
struct Looks final : nn::ModuleObserver {
  std::string prefix;
  const Net& by_hand;
  int count = 0;

  Looks(std::string prefix, const Net& by_hand) : prefix(std::move(prefix)), by_hand(by_hand) {}
  void before_forward(nn::Module& module, std::span<Tensor* const>) override {
    ++count;
    const std::vector<nn::NamedParameter> listed = module.named_parameters();
    std::size_t at = 0;
    for (const nn::NamedParameter& p : by_hand.named_parameters()) {
      if (!p.name.starts_with(prefix)) continue;
      expect(prefix + listed[at].name == p.name, "in forward: '{}' in place of '{}'", listed[at].name,
             p.name);
      if (!prefix.empty() || !p.name.starts_with("blocks."))
        expect_same(listed[at].parameter.data(), p.parameter.data(), p.name, "in forward");
      ++at;
    }
    expect(at == listed.size(), "in forward of '{}': {} parameters instead of {}", prefix, listed.size(), at);
  }
};

}  // namespace

TEST_CASE("a parameter shows this rank's part, and the whole while its module has it") {
  on_ways([](World& world, const Way& way) {
    Net by_hand = uneven(), net = uneven();
    way.wrap(net);
    const Parts parts(net, way, world.rank());
    const auto check = [&](bool whole, std::string_view when) {
      const std::vector<nn::NamedParameter> expected = by_hand.named_parameters();
      const std::vector<nn::NamedParameter> actual = net.named_parameters();
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const auto& [name, reference] = expected[i];
        const nn::Parameter& p = actual[i].parameter;
        expect(actual[i].name == name, "{}: '{}' in place of '{}'", when, actual[i].name, name);
        expect(p.shape() == reference.shape(), "{}: '{}' has the whole's shape {}", when, name, p.shape());
        const Tensor part = parts.of(name, reference.data());
        expect_same(p.data(), whole ? reference.data() : part, name, when);
        expect_same(p.local().detach(), part, name, when);
        if (const Tensor gradient = p.grad(); gradient.defined())
          expect(gradient.shape() == part.shape(), "{}: '{}' has a gradient of shape {}", when, name,
                 gradient.shape());
      }
    };
    const auto check_summoned = [&](std::string_view when) {
      const shard::SummonFullParams scope(net);
      const std::vector<nn::NamedParameter> expected = by_hand.named_parameters();
      const std::vector<nn::NamedParameter> actual = net.named_parameters();
      for (std::size_t i = 0; i < expected.size(); ++i) {
        expect(actual[i].name == expected[i].name, "{}: '{}'", when, actual[i].name);
        expect_same(actual[i].parameter.data(), expected[i].parameter.data(), expected[i].name, when);
      }
    };
    std::vector<std::unique_ptr<Looks>> looks;
    std::vector<Subscription> watching;
    const auto watch = [&](nn::Module& module, std::string prefix) {
      looks.push_back(std::make_unique<Looks>(std::move(prefix), by_hand));
      watching.push_back(module.observe(*looks.back()));
    };
    watch(net, "");
    for (std::size_t i = 0; i < net.blocks.size(); ++i) watch(net.blocks[i], fmt::format("blocks.{}.", i));

    nn::Adam of_net(net.parameters()), of_by_hand(by_hand.parameters());
    check(false, "when it was sharded");
    for (const int step : {0, 1}) {
      {
        const NoGrad guard;
        loss_at(net, world.rank(), step);
        check(false, "after a forward without gradients");
      }
      const Tensor loss = loss_at(net, world.rank(), step);
      check(way.keeps(), "after a forward");
      check_summoned("summoned between forward and backward");
      of_net.zero_grad();
      loss.backward();
      check(false, "after a backward");
      check_summoned("summoned after a backward");
      check(false, "after it was summoned");
      set_gradients(by_hand, plain(by_hand, world, step));
      const std::vector<nn::NamedParameter> expected = by_hand.named_parameters();
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const auto& [name, reference] = expected[i];
        const Tensor gradient = net.parameters()[i].grad();
        expect(gradient.defined() || parts.empty(name), "'{}' has no gradient", name);
        if (gradient.defined()) expect_same(gradient, parts.of(name, reference.grad()), name, "gradient");
      }
      of_net.step();
      of_by_hand.step();
      check(false, "after a step");
    }
    {
      const shard::NoSync scope(net);
      of_net.zero_grad();
      loss_at(net, world.rank(), 2).backward();
    }
    by_hand.zero_grad();
    loss_at(by_hand, world.rank(), 2).backward();
    const std::vector<nn::NamedParameter> expected = by_hand.named_parameters();
    const std::vector<nn::Parameter> actual = net.parameters();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const auto& [name, reference] = expected[i];
      expect_same(actual[i].data(), parts.of(name, reference.data()), name,
                  "after a backward without averaging");
      expect_same(actual[i].grad(), reference.grad(), name, "this rank's own gradient");
    }
    for (const auto& l : looks) expect(l->count == 5, "{} looks at '{}'", l->count, l->prefix);
  });
}

// ---- optimizers ----

namespace {

/// Weights, the others, and nobody.
std::vector<nn::ParamGroup> three_groups(const nn::Module& module) {
  return {{.params = parameters_of(module, [](const std::string& n) { return !is_bias(n); }),
           .lr = 1e-2,
           .weight_decay = 0.1},
          {.params = {}},
          {.params = parameters_of(module, is_bias), .weight_decay = 0.01}};
}

/// The steps that an optimizer made, by the index of the parameter; of those that it has state of.
std::map<std::string, double> step_counts(const nn::Optimizer& optimizer) {
  std::map<std::string, double> counts;
  for (const auto& [name, value] : optimizer.state_dict())
    if (name.ends_with(".step")) counts[name] = value.item();
  return counts;
}

/// What this rank counts, the unsharded optimizer counts too.
void expect_counts(const nn::Optimizer& of_net, const nn::Optimizer& of_by_hand, std::string_view when) {
  const std::map<std::string, double> counts = step_counts(of_net), expected = step_counts(of_by_hand);
  for (const auto& [name, count] : counts) {
    expect(expected.contains(name), "{}: {} is counted", when, name);
    expect(count == expected.at(name), "{}: {} is {} instead of {}", when, name, count, expected.at(name));
  }
}

}  // namespace

TEST_CASE("an optimizer that was made before holds the same parameters after sharding, a move and a cast") {
  for (const bool before : {false, true})
    for (const DType dtype : {f32, f64})
      on_ways([&](World& world, const Way& way) {
        const Device device = Device::cpu(1);
        const auto move = [&](Net& net) {
          net.to(device);
          net.to(dtype);
        };
        Net replica = uneven(), net = uneven();
        move(replica);
        const shard::DataParallel averaging(replica, world.group());
        nn::AdamW of_replica(three_groups(replica), {.lr = 1e-3});
        std::optional<nn::AdamW> of_net;
        if (before) of_net.emplace(three_groups(net), nn::AdamWOptions{.lr = 1e-3});
        const std::vector<nn::Parameter> objects = net.parameters();
        way.wrap(net);
        move(net);
        expect(net.parameters() == objects, "the objects of before");
        if (!before) of_net.emplace(three_groups(net), nn::AdamWOptions{.lr = 1e-3});
        for (const int step : {0, 1, 2}) {
          for (Net* n : {&net, &replica}) {
            const Batch batch = batch_of(world.rank(), step, n->width);
            const auto on_device = [&](const Tensor& t) { return to(to(t, device), dtype); };
            mean(square((*n)(on_device(batch.x))-on_device(batch.target))).backward();
          }
          for (const nn::Parameter& p : net.parameters()) {
            expect(p.local().device() == device && p.local().dtype() == dtype, "the parameter was moved");
            expect(!p.grad().defined() || p.grad().spec() == p.local().spec(), "so is its gradient");
          }
          of_net->step();
          of_replica.step();
          expect_values(net, replica, "a step");
          expect_counts(*of_net, of_replica, "a step");
          of_net->zero_grad();
          of_replica.zero_grad();
        }
      });
}

TEST_CASE("two optimizers: one clears to none and the other to zeros, and each counts its own steps") {
  on_ways([](World& world, const Way& way) {
    struct Two {
      nn::Adam weights;
      nn::AdamW others;
      explicit Two(const nn::Module& module)
          : weights(parameters_of(module, [](const std::string& n) { return !is_bias(n); }), {.lr = 1e-2}),
            others(std::vector<nn::ParamGroup>{{parameters_of(module, is_bias)}, {}},
                   {.lr = 1e-2, .weight_decay = 0.1}) {}
      void clear() {
        weights.zero_grad(nn::ZeroGrad::to_none);
        others.zero_grad(nn::ZeroGrad::to_zero);
      }
      void step() {
        weights.step();
        others.step();
      }
    };
    Net by_hand = uneven(), net = uneven();
    Two of_by_hand(by_hand), of_net(net);
    way.wrap(net);
    // What is cleared, when, and whether a backward follows: without one, weights have no gradient.
    for (const int step : {0, 1, 2, 3, 4, 5}) {
      const bool backward = step % 3 != 2;
      if (step % 2 == 0) of_net.clear();
      const Tensor loss = loss_at(net, world.rank(), step);
      if (step % 2 == 1) of_net.clear();
      if (backward) loss.backward();
      of_by_hand.clear();
      if (backward) set_gradients(by_hand, plain(by_hand, world, step));
      of_net.step();
      of_by_hand.step();
      expect_values(net, by_hand, "a step");
      expect_counts(of_net.weights, of_by_hand.weights, "weights");
      expect_counts(of_net.others, of_by_hand.others, "the others");
    }
    const auto most = [](const nn::Optimizer& o) {
      double most = 0;
      for (const auto& [name, count] : step_counts(o)) most = std::max(most, count);
      return most;
    };
    expect(most(of_by_hand.weights) == 4 && most(of_by_hand.others) == 6, "steps of the reference: {} and {}",
           most(of_by_hand.weights), most(of_by_hand.others));
  });
}

TEST_CASE(
    "what is frozen, alone or with others, stays as it is and has no gradient; flags may change after "
    "sharding") {
  using Frozen = std::function<bool(const std::string&)>;
  const auto in_block = [](const std::string& n) { return n.starts_with("blocks.1."); };
  const std::vector<Frozen> frozen = {[](const std::string&) { return false; },
                                      is_bias,
                                      [&](const std::string& n) { return in_block(n) && !is_bias(n); },
                                      in_block,
                                      [](const std::string& n) { return n != "embed.weight"; },
                                      [](const std::string&) { return false; }};
  for (const std::size_t first : {0, 1, 3})  // what is frozen when the net is sharded
    on_ways([&](World& world, const Way& way) {
      Net by_hand = uneven(), net = uneven();
      nn::AdamW of_by_hand(three_groups(by_hand)), of_net(three_groups(net));
      for (std::size_t step = first; step < frozen.size(); ++step) {
        for (Net* n : {&by_hand, &net})
          for (nn::NamedParameter& p : n->named_parameters())
            p.parameter.set_requires_grad(!frozen[step](p.name));
        if (step == first) way.wrap(net);
        const nn::StateDict before = shard::full_state_dict(net);
        of_net.zero_grad();
        loss_at(net, world.rank(), static_cast<int>(step)).backward();
        for (const nn::NamedParameter& p : net.named_parameters())
          expect(!frozen[step](p.name) || !p.parameter.grad().defined(), "'{}' is frozen and has a gradient",
                 p.name);
        set_gradients(by_hand, plain(by_hand, world, static_cast<int>(step)));
        of_net.step();
        of_by_hand.step();
        expect_values(net, by_hand, "a step");
        expect_counts(of_net, of_by_hand, "a step");
        const nn::StateDict after = shard::full_state_dict(net);
        for (std::size_t i = 0; i < before.size(); ++i)
          expect((after[i].second.to_vector<float>() == before[i].second.to_vector<float>()) ==
                     frozen[step](before[i].first),
                 "'{}' was stepped or left as it is", before[i].first);
      }
    });
}
