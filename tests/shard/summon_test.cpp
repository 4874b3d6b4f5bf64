// Scopes in which sharded parameters are whole: what they show, what is kept, and what waits until they end.
#include "shard/summon.h"

#include "nn/init.h"
#include "shard/fsdp.h"
#include "shard/fully_shard.h"
#include "tests/sanitizer.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

enum class Form { per_parameter, flat, orig_params, flat_param };
constexpr Form forms[] = {Form::per_parameter, Form::flat, Form::orig_params, Form::flat_param};

struct Way {
  Form form;
  shard::ShardingStrategy strategy;
  shard::MixedPrecisionPolicy mixed{};
};

void wrap(Net& net, const Way& way) {
  if (way.form == Form::per_parameter || way.form == Form::flat)
    return shard_blocks_and_rest(
        net, {.layout = way.form == Form::flat ? shard::GroupLayout::flat : shard::GroupLayout::per_parameter,
              .strategy = way.strategy,
              .mixed_precision = way.mixed});
  const shard::FullyShardedDataParallel handle(net, {.strategy = way.strategy,
                                                     .auto_wrap = shard::wrap_classes({"Block"}),
                                                     .mixed_precision = way.mixed,
                                                     .use_orig_params = way.form == Form::orig_params});
}

Net seeded_net() {
  manual_seed(4);
  return Net({.uneven = true});
}

/// `body(world, way)`.
template <class F>
void on_all(F&& body, std::vector<shard::MixedPrecisionPolicy> mixed = {{}, {.param_dtype = DType::bf16}}) {
  using enum shard::ShardingStrategy;
  for (const int ranks : worlds())
    for (const Form form : forms)
      for (const shard::ShardingStrategy strategy : {full_shard, shard_grad_op, zero1, no_shard})
        for (const shard::MixedPrecisionPolicy& policy : mixed) {
          INFO(ranks << " ranks, form " << static_cast<int>(form) << ", strategy "
                     << static_cast<int>(strategy) << ", mixed " << policy.param_dtype.has_value());
          CHECK_NOTHROW(run_ranks(ranks, [&](World& world) { body(world, Way{form, strategy, policy}); }));
        }
}

void expect_whole(const nn::Module& net, const nn::Module& by_hand, const char* when) {
  const std::vector<nn::NamedParameter> seen = net.named_parameters(), expected = by_hand.named_parameters();
  expect(seen.size() == expected.size(), "{}: {} parameters", when, seen.size());
  for (std::size_t i = 0; i < seen.size(); ++i) {
    const nn::Parameter &p = seen[i].parameter, &q = expected[i].parameter;
    expect(seen[i].name == expected[i].name, "{}: '{}'", when, seen[i].name);
    expect(p.data().dtype() == q.data().dtype() && p.data().shape() == q.data().shape(),
           "{}: the look of '{}'", when, seen[i].name);
    expect(p.data().to_vector<float>() == q.data().to_vector<float>() &&
               p.tensor().detach().to_vector<float>() == q.data().to_vector<float>(),
           "{}: values of '{}'", when, seen[i].name);
  }
}

std::vector<Shape> looks(const nn::Module& net) {
  std::vector<Shape> shapes;
  for (const nn::Parameter& p : net.parameters()) shapes.push_back(p.data().shape());
  return shapes;
}

Gradients averages(Net& by_hand, const World& world, int step) {
  return average_by_hand(by_hand, world.size(), [&](int rank) { loss_at(by_hand, rank, step).backward(); });
}

}  // namespace

TEST_CASE("summoned parameters are whole, by their own names, and look as before afterwards") {
  on_all([](World&, const Way& way) {
    Net by_hand = seeded_net(), net = seeded_net();
    wrap(net, way);
    const std::vector<Shape> before = looks(net);
    const nn::StateDict own = net.state_dict();
    for (int times = 0; times < 2; ++times) {
      {
        const auto scope = shard::summon_full_params(net);
        expect_whole(net, by_hand, "in the scope");
      }
      expect(looks(net) == before, "as before");
    }
    expect_values(net, by_hand, "afterwards");
  });
}

TEST_CASE("what is written in the scope is kept with writeback and lost without") {
  on_all([](World& world, const Way& way) {
    for (const bool writeback : {true, false}) {
      Net by_hand = seeded_net(), net = seeded_net();
      wrap(net, way);
      nn::Sgd optimizer(net.parameters(), {.lr = 0.1});
      const auto change = [](Net& n) {
        const NoGrad guard;
        int i = 0;
        for (const nn::NamedParameter& p : n.named_parameters()) {
          nn::Parameter object = p.parameter;
          if (i % 3 == 0) mul_(object.data(), 0.5);
          if (i % 3 == 1) object.set_data(full(object.shape(), 0.25));
          ++i;
        }
        manual_seed(9);
        nn::init::normal_(n.named_parameters()[2].parameter, 0, 1);
      };
      {
        const auto scope = shard::summon_full_params(net, {.writeback = writeback});
        change(net);
        if (writeback)
          change(by_hand);
        else {
          Net changed = seeded_net();
          change(changed);
          expect_whole(net, changed, "in the scope");
        }
      }
      expect_values(net, by_hand, "afterwards");
      {
        const auto scope = shard::summon_full_params(net);
        expect_whole(net, by_hand, "once more");
      }
      if (way.mixed.param_dtype) continue;
      loss_at(net, world.rank(), 0).backward();
      set_gradients(by_hand, averages(by_hand, world, 0));
      nn::Sgd reference(by_hand.parameters(), {.lr = 0.1});
      optimizer.step();
      reference.step();
      expect_values(net, by_hand, "after a step");
    }
  });
}

TEST_CASE("summoning between forwards and before a backward changes no gradient") {
  on_all([](World& world, const Way& way) {
    std::vector<Gradients> seen;
    for (const bool summons : {false, true}) {
      Net net = seeded_net();
      wrap(net, way);
      const auto look = [&] {
        if (summons) const auto scope = shard::summon_full_params(net);
      };
      look();
      const Tensor first = loss_at(net, world.rank(), 0);
      look();
      const Tensor second = loss_at(net, world.rank(), 1);
      look();
      add(first, second).backward();
      look();
      seen.push_back(gradients(net));
    }
    expect(difference(seen[0], seen[1]).empty(), "{}", difference(seen[0], seen[1]));
  });
}

TEST_CASE("a backward refuses values that were written in a scope since its forward") {
  on_all([](World& world, const Way& way) {
    Net net = seeded_net();
    wrap(net, way);
    const Tensor loss = loss_at(net, world.rank(), 0);
    {
      const auto scope = shard::summon_full_params(net);
      const NoGrad guard;
      for (const nn::Parameter& p : net.parameters()) mul_(p.data(), 0.5);
    }
    expect(!message_of<StateError>([&] { loss.backward(); }).empty(), "it throws");
    loss_at(net, world.rank(), 0).backward();
  });
}

TEST_CASE("what is computed from summoned parameters gives them gradients, averaged after the scope") {
  on_all(
      [](World& world, const Way& way) {
        Net by_hand = seeded_net(), net = seeded_net();
        wrap(net, way);
        const auto penalty = [](const Net& n, int rank) {
          Tensor total = zeros({});
          for (const nn::Parameter& p : n.parameters()) total = add(total, sum(square(p.tensor())));
          return mul(total, 1.0 + rank);
        };
        Tensor loss;
        {
          const auto scope = shard::summon_full_params(net);
          loss = penalty(net, world.rank());
          expect(!message_of<StateError>([&] { loss.backward(); }).empty(), "not in the scope");
          loss = penalty(net, world.rank());
        }
        loss.backward();
        if (way.form == Form::flat_param) return;  // lists it as one
        expect_gradients(
            net, world,
            average_by_hand(by_hand, world.size(), [&](int rank) { penalty(by_hand, rank).backward(); }),
            "of the penalty");
      },
      {{}});
}

TEST_CASE("one rank alone sees and uses what is whole where that is asked for") {
  on_all([](World& world, const Way& way) {
    Net by_hand = seeded_net(), net = seeded_net();
    wrap(net, way);
    const std::vector<Shape> before = looks(net);
    expect(message_of<ValueError>([&] {
             const auto scope = shard::summon_full_params(net, {.rank0_only = true});
           }).find("not supported") != std::string::npos,
           "with writeback");
    {
      const auto scope = shard::summon_full_params(net, {.writeback = false, .rank0_only = true});
      if (world.rank() == 0) {
        expect_whole(net, by_hand, "rank 0");
        const NoGrad guard;
        for (const nn::Parameter& p : net.parameters()) mul_(p.data(), 2.0);
      } else {
        expect(looks(net) == before, "parts");
      }
    }
    expect_values(net, by_hand, "afterwards");
    loss_at(net, world.rank(), 0).backward();
  });
}

TEST_CASE("whole values lie where the module computes, or on the host") {
  for (const int ranks : {1, 2, 3})
    for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
      for (const bool offload : {false, true})
        CHECK_NOTHROW(run_ranks(ranks, [&](World&) {
          Net by_hand = seeded_net(), net = seeded_net();
          shard_blocks_and_rest(
              net, {.layout = layout, .device = Device::cpu(0), .compute_device = Device::cpu(1)});
          {
            const auto scope = shard::summon_full_params(net, {.offload_to_cpu = offload});
            const NoGrad guard;
            for (Net* n : {&net, &by_hand})
              for (const nn::Parameter& p : n->parameters()) mul_(p.data(), 0.5);
            for (const nn::Parameter& p : net.parameters())
              expect(p.data().device() == Device::cpu(offload ? 0 : 1), "the device");
          }
          for (const nn::Parameter& p : net.parameters())
            expect(p.local().device() == Device::cpu(0), "the part's");
          expect_values(net, by_hand, "written back");
        }));
}

TEST_CASE("gradients are whole too where that is asked for, and kept as values are") {
  on_all(
      [](World& world, const Way& way) {
        Net by_hand = seeded_net(), net = seeded_net();
        wrap(net, way);
        const auto summoned = [&](bool writeback) {
          return shard::summon_full_params(net, {.writeback = writeback, .with_grads = true});
        };
        if (way.form == Form::flat_param) {
          expect(!message_of<ValueError>([&] { const auto scope = summoned(true); }).empty(), "refused");
          return;
        }
        loss_at(net, world.rank(), 0).backward();
        set_gradients(by_hand, averages(by_hand, world, 0));
        for (Net* n : {&net, &by_hand}) n->parameters()[1].set_grad({});
        const Gradients parts = gradients(net);
        {
          const auto scope = summoned(true);
          expect(difference(gradients(net), gradients(by_hand)).empty(), "{}",
                 difference(gradients(net), gradients(by_hand)));
        }
        expect(difference(gradients(net), parts).empty(), "untouched ones stay");
        {
          const auto scope = summoned(false);
          for (const nn::Parameter& p : net.parameters())
            if (p.grad().defined()) mul_(p.grad(), 3.0);
          net.parameters()[0].set_grad({});
          net.parameters()[1].set_grad(zeros(net.parameters()[1].shape()));
        }
        expect(difference(gradients(net), parts).empty(), "lost without writeback");
        {
          const auto scope = summoned(true);
          for (Net* n : {&net, &by_hand}) {
            for (const nn::Parameter& p : n->parameters())
              if (p.grad().defined()) mul_(p.grad(), 3.0);
            n->parameters()[0].set_grad({});
            n->parameters()[2].set_grad(full(n->parameters()[2].shape(), 0.125));
            n->parameters()[1].set_grad(full(n->parameters()[1].shape(), 0.25));  // where none was
          }
        }
        expect_gradients(net, world, gradients(by_hand), "kept with it");
        const auto wrong = [&] {
          const auto scope = summoned(true);
          net.parameters()[2].set_grad(zeros({3, 1, 7}));
        };
        expect(message_of<ShapeError>(wrong).find("Cannot writeback when the gradient shape changes") !=
                   std::string::npos,
               "another shape");
        for (nn::Parameter p : net.parameters())
          if (way.form != Form::per_parameter && p.local().numel() == 0) p.set_grad(zeros({4}));
        summoned(false);  // what a rank without a part has counts for nothing
      },
      {{}});
}

TEST_CASE("a rank's own gradients stay as they are in a scope") {
  on_all(
      [](World& world, const Way& way) {
        if (way.form == Form::flat_param) return;
        Net net = seeded_net();
        wrap(net, way);
        {
          const auto guard = shard::no_sync(net);
          loss_at(net, world.rank(), 0).backward();
        }
        const Gradients own = gradients(net);
        const auto scope = shard::summon_full_params(net, {.with_grads = true});
        expect(difference(gradients(net), own).empty(), "in the scope");
      },
      {{}});
}

namespace {

struct Summoner final : nn::Layer<Summoner> {
  nn::Linear inner{4, 4};
  std::function<void()> act;
  Tensor forward(const Tensor& x) const {
    const Tensor y = inner(x);
    if (act) act();
    return y;
  }
  void visit(auto&& on) { on("inner", inner); }
};

}  // namespace

TEST_CASE(
    "a module's state that is loaded in a scope is of whole parameters, and kept as what is written there") {
  on_all([](World&, const Way& way) {
    Net net = seeded_net(), by_hand = seeded_net(), other{NetOptions{.uneven = true}};
    wrap(net, way);
    const nn::StateDict state = other.state_dict();
    for (const bool writeback : {false, true}) {
      {
        const auto scope = shard::summon_full_params(net, {.writeback = writeback});
        net.load_state_dict(state);
        expect_whole(net, other, "in the scope");
      }
      const auto scope = shard::summon_full_params(net);
      expect_whole(net, writeback ? other : by_hand, writeback ? "kept" : "not kept");
    }
  });
}

TEST_CASE("a host read of what is not gathered says which parameter, and where to see it") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Net net = seeded_net();
    shard_blocks_and_rest(net, {.layout = layout});
    loss_at(net, world.rank(), 0).backward();
    const Tensor weight = net.blocks[1].in.weight.tensor();
    const std::string message = message_of<StateError>([&] { weight.to_vector<float>(); });
    for (const char* words : {"'blocks.1' (", "in.weight", "local()", "summon_full_params"})
      expect(message.find(words) != std::string::npos, "'{}' is not in '{}'", words, message);
  });
}

TEST_CASE("scopes are refused within forwards, backwards and each other, and all else waits until they end") {
  for (const int ranks : {1, 2, 3})
    for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Summoner net;
        manual_seed(world.rank());
        shard::fully_shard(net.inner, {.layout = layout});
        shard::fully_shard(net, {.layout = layout});
        nn::Sgd sgd(net.parameters(), {.lr = 0.1});
        const auto summons = [&] { const auto scope = shard::summon_full_params(net); };
        const auto refused = [](auto&& act, std::string_view text) {
          const std::string message = message_of<StateError>(act);
          expect(message.find(text) != std::string::npos, "'{}' in: {}", text, message);
        };
        constexpr std::string_view running = "Cannot manually unshard parameters during forward/backward";
        const Tensor x = ones({2, 4});
        net.act = [&] { refused(summons, running); };
        const Tensor y = net(x);
        net.act = {};
        bool hooked = false;
        const auto hook = register_hook(y, [&](const Tensor&) -> Tensor {
          refused(summons, running);
          hooked = true;
          return {};
        });
        sum(y).backward();
        expect(hooked, "the hook ran");
        // Reaches no parameter, but a backward gathers for it.
        net.set_requires_grad(false);
        Tensor input = ones({2, 4});
        input.requires_grad_();
        const Tensor through = sum(net(input));
        net.set_requires_grad(true);
        {
          const auto scope = shard::summon_full_params(net);
          refused(summons, "summoned already");
          refused([&] { net(x); }, "a forward begins");
          refused([&] { sgd.step(); }, "parameters are written");
          refused([&] { shard::full_state_dict(net); }, "end that scope first");
          refused([&] { net.to(DType::f64); }, "moved or cast");
          refused([&] { const Summoner copy = net.clone(); }, "is cloned");
          refused([&] { through.backward(); }, "shows whole");
          const NoGrad guard;
          refused([&] { mul_(net.inner.weight.local(), 2.0); }, "write data()");
        }
        sgd.step();
        sum(net(x)).backward();
      }));
}

TEST_CASE("parameters that a module around keeps are not summoned from within") {
  on_all(
      [](World&, const Way& way) {
        Net net = seeded_net();
        wrap(net, way);
        for (const bool recurse : {true, false})
          for (nn::Linear* inner : {&net.blocks[0].in, &net.head}) {
            const std::string message = message_of<StateError>(
                [&] { const auto scope = shard::summon_full_params(*inner, {.recurse = recurse}); });
            expect(message.find("Linear: 'weight' was sharded") != std::string::npos, "'{}'", message);
          }
        const auto scope = shard::summon_full_params(net.blocks);  // no unit, and nothing but units in it
        const nn::Param& weight = net.blocks[0].in.weight;
        expect(weight.data().shape() == weight.shape(), "whole");
      },
      {{}});
}

TEST_CASE("a module with a summoned one in it moves as a whole or not at all") {
  on_all(
      [](World&, const Way& way) {
        Net net = seeded_net();
        wrap(net, way);
        const auto scope = shard::summon_full_params(net.blocks[1]);
        const auto before = net.state_dict();
        for (const bool cast : {true, false}) {
          const std::string message = message_of<StateError>([&] {
            if (cast)
              net.to(f64);
            else
              net.materialize(Device::cpu(1), [](const std::string&, const Tensor&) {});
          });
          expect(message.find("moved or cast") != std::string::npos, "'{}'", message);
        }
        const auto after = net.state_dict();
        for (std::size_t i = 0; i < before.size(); ++i)
          expect(after[i].second.dtype() == f32 && after[i].second.device() == Device::cpu(),
                 "'{}' has moved", after[i].first);
      },
      {{}});
}

TEST_CASE("a module's own state in a scope has the wholes that it shows, and the parts beside them") {
  on_all(
      [](World& world, const Way& way) {
        Net by_hand = seeded_net(), net = seeded_net();
        wrap(net, way);
        const nn::StateDict own = net.state_dict();
        {
          const auto scope = shard::summon_full_params(net);
          for (const nn::NamedParameter& p : net.named_parameters()) fill_(p.parameter.data(), 2);
          const nn::StateDict found = net.state_dict(), expected = by_hand.state_dict();
          expect(found.size() == expected.size(), "{} entries", found.size());
          for (std::size_t i = 0; i < found.size(); ++i)
            expect(found[i].first == expected[i].first &&
                       found[i].second.to_vector<float>() ==
                           full(expected[i].second.shape(), 2.0).to_vector<float>(),
                   "'{}' of shape {}", found[i].first, found[i].second.shape());
        }
        const auto scope = shard::summon_full_params(net, {.writeback = false, .rank0_only = true});
        if (world.rank() == 0 || way.form == Form::flat_param) return;
        const nn::StateDict parts = net.state_dict();
        for (std::size_t i = 0; i < parts.size(); ++i)
          if (way.strategy != shard::ShardingStrategy::no_shard)
            expect(parts[i].second.shape() == own[i].second.shape(), "'{}' is a part", parts[i].first);
      },
      {{}});
}

TEST_CASE("a module is not moved within a forward or backward that uses it") {
  for (const int ranks : {1, 2, 3})
    CHECK_NOTHROW(run_ranks(ranks, [&](World&) {
      Summoner net;
      shard::fully_shard(net.inner);
      shard::fully_shard(net);
      int refusals = 0;
      const auto refused = [&] {
        const std::string message = message_of<StateError>([&] { net.to(f64); });
        expect(message.find("within a forward or backward") != std::string::npos, "'{}'", message);
        ++refusals;
      };
      net.act = refused;
      const Tensor y = net(ones({2, 4}));
      net.act = {};
      const auto hook = register_hook(y, [&](const Tensor&) -> Tensor {
        refused();
        return {};
      });
      sum(y).backward();
      expect(refusals == 2, "{} refusals", refusals);
      net.to(f64);
      sum(net(ones({2, 4}, {f64}))).backward();
    }));
}

TEST_CASE("an exception in a scope leaves every rank able to go on") {
  on_all(
      [](World& world, const Way& way) {
        Net by_hand = seeded_net(), net = seeded_net();
        wrap(net, way);
        nn::Sgd optimizer(net.parameters(), {.lr = 0.1}), reference(by_hand.parameters(), {.lr = 0.1});
        try {
          const auto scope = shard::summon_full_params(net);
          if (world.rank() == 0) throw std::runtime_error("of one rank");
        } catch (const std::runtime_error&) {
        }
        for (int step = 0; step < 2; ++step) {
          optimizer.zero_grad();
          loss_at(net, world.rank(), step).backward();
          set_gradients(by_hand, averages(by_hand, world, step));
          optimizer.step();
          reference.step();
        }
        expect_values(net, by_hand, "as if nothing had been");
      },
      {{}});
}

TEST_CASE("without recursion only the module's own parameters are whole") {
  on_all(
      [](World& world, const Way& way) {
        Net net = seeded_net();
        wrap(net, way);
        const auto scope = shard::summon_full_params(net, {.recurse = false});
        int whole = 0, parts = 0;
        for (const auto& [name, p] : net.named_parameters())
          (p.data().shape() == p.shape() && !name.ends_with("_flat_param") ? whole : parts) += 1;
        expect(whole > 0, "its own");
        if (world.size() > 1 && way.strategy != shard::ShardingStrategy::no_shard)
          expect(parts > 0, "those below are not");
      },
      {{}});
}
