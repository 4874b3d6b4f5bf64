// The state of an optimizer over shards, gathered and taken apart again.
#include "shard/optimizer_state.h"

#include <algorithm>
#include <map>
#include <set>

#include "collectives/world.h"
#include "nn/layers.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/checkpoint.h"
#include "shard/fsdp.h"
#include "shard/fully_shard.h"
#include "shard/sharded_state.h"
#include "tests/catch.h"
#include "tests/message_of.h"
#include "tests/ranks.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// Rows that no number of ranks divides, fewer of them than ranks, and a layer that some steps leave out.
struct Net final : nn::Layer<Net> {
  nn::Linear first{5, 7}, last{7, 2}, spare{3, 3};
  bool use_spare = false;
  Tensor forward(const Tensor& x) const {
    const Tensor y = sum(square(last(gelu(first(x)))));
    return use_spare ? add(y, sum(spare(ones({2, 3})))) : y;
  }
  void visit(auto&& on) {
    on("first", first);
    on("last", last);
    on("spare", spare);
  }
};

enum class Kind { adamw, sgd, momentum, rmsprop };
constexpr Kind kinds[] = {Kind::adamw, Kind::sgd, Kind::momentum, Kind::rmsprop};

std::unique_ptr<nn::Optimizer> optimizer_of(Kind kind, const Net& net) {
  nn::ParamGroup matrices{.lr = 0.1}, vectors{.lr = 0.2};
  for (const nn::Parameter& p : net.parameters())
    (p.shape().rank() == 2 ? matrices : vectors).params.push_back(p);
  if (kind == Kind::adamw)
    return std::make_unique<nn::AdamW>(std::vector{matrices, vectors}, nn::AdamWOptions{});
  if (kind == Kind::rmsprop) {
    vectors.options["momentum"] = 0.5;
    return std::make_unique<nn::Rmsprop>(std::vector{matrices, vectors},
                                         nn::RmspropOptions{.centered = true});
  }
  return std::make_unique<nn::Sgd>(std::vector{matrices, vectors},
                                   nn::SgdOptions{.momentum = kind == Kind::momentum ? 0.9 : 0.0});
}

Net seeded_net() {
  manual_seed(3);
  return {};
}

/// A step whose loss is `weight` times that of the unsharded run.
void train(Net& net, nn::Optimizer& optimizer, int step, double weight = 1) {
  net.use_spare = step == 2;
  manual_seed(100 + static_cast<std::uint64_t>(step));
  mul(net(rand({4, 5})), weight).backward();
  optimizer.step();
  optimizer.zero_grad();
}

using Values = std::map<std::string, std::vector<double>>;
Values values(const nn::StateDict& state) {
  Values all;
  for (const auto& [name, tensor] : state) all[name] = to(tensor, DType::f64).to_vector<double>();
  return all;
}

/// State and weights of `steps` steps without ranks.
struct Plain {
  Net net = seeded_net();
  std::unique_ptr<nn::Optimizer> optimizer;
  Plain(Kind kind, int steps) : optimizer(optimizer_of(kind, net)) {
    for (int step = 0; step < steps; ++step) train(net, *optimizer, step);
  }
};

void shard_net(Net& net, const World& world, shard::GroupLayout layout) {
  const shard::Options options{.mesh = world.mesh(), .layout = layout};
  shard::fully_shard(net.first, options);
  shard::fully_shard(net.spare, options);  // left out as a whole: no gradient in either layout
  shard::fully_shard(net, options);
}

/// That of the first parameter that has state.
nn::StateDict::iterator first_entry(nn::StateDict& state) {
  return std::ranges::find_if(state, [](const auto& entry) { return entry.first.starts_with("state."); });
}

/// The whole loss lies on rank 0, so that an average over a power of two rounds nothing.
double weight_of(const World& world) { return world.rank() == 0 ? world.size() : 0; }

constexpr shard::GroupLayout layouts[] = {shard::GroupLayout::flat, shard::GroupLayout::per_parameter};

/// `body(world, layout, kind)` on every rank.
void on_ranks(const std::function<void(const World&, shard::GroupLayout, Kind)>& body) {
  for (const int ranks : {1, 2, 4, 8})
    for (const shard::GroupLayout layout : layouts)
      for (const Kind kind : kinds) {
        INFO(ranks << " ranks, layout " << static_cast<int>(layout) << ", optimizer "
                   << static_cast<int>(kind));
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) { body(world, layout, kind); }));
      }
}

}  // namespace

TEST_CASE("the gathered state of an optimizer is that of the unsharded run") {
  on_ranks([](const World& world, shard::GroupLayout layout, Kind kind) {
    for (const int steps : {0, 2, 3}) {
      const Plain plain(kind, steps);
      Net net = seeded_net();
      shard_net(net, world, layout);
      const auto optimizer = optimizer_of(kind, net);
      for (int step = 0; step < steps; ++step) train(net, *optimizer, step, weight_of(world));
      const nn::StateDict full = shard::full_optimizer_state(*optimizer),
                          expected = plain.optimizer->state_dict();
      expect(full.size() == expected.size(), "{} entries of {} after {} steps", full.size(), expected.size(),
             steps);
      for (std::size_t i = 0; i < full.size(); ++i) {
        expect(full[i].first == expected[i].first, "entry {} is {}", i, full[i].first);
        expect(full[i].second.shape() == expected[i].second.shape(), "shape of {}", full[i].first);
        expect(full[i].second.dtype() == expected[i].second.dtype(), "dtype of {}", full[i].first);
      }
      expect(values(full) == values(expected), "values after {} steps", steps);
    }
  });
}

TEST_CASE("a sharded optimizer that takes whole state goes on as the run that it is of") {
  on_ranks([](const World& world, shard::GroupLayout layout, Kind kind) {
    Plain plain(kind, 3);
    Net net = seeded_net();
    shard_net(net, world, layout);
    const auto optimizer = optimizer_of(kind, net);
    shard::load_full_state_dict(net, plain.net.state_dict());
    shard::load_full_optimizer_state(*optimizer, plain.optimizer->state_dict());
    for (int step = 3; step < 5; ++step) {
      train(net, *optimizer, step, weight_of(world));
      train(plain.net, *plain.optimizer, step);
    }
    expect(values(shard::full_state_dict(net)) == values(plain.net.state_dict()), "weights");
    expect(values(shard::full_optimizer_state(*optimizer)) == values(plain.optimizer->state_dict()), "state");
  });
}

TEST_CASE("a whole state brings its options along, and what they call for") {
  on_ranks([](const World& world, shard::GroupLayout layout, Kind kind) {
    if (kind != Kind::momentum && kind != Kind::rmsprop) return;
    Plain plain(kind, 3);
    Net net = seeded_net();
    shard_net(net, world, layout);
    std::vector<nn::ParamGroup> groups;  // without their options
    for (std::size_t g = 0; g < 2; ++g) groups.push_back({optimizer_of(kind, net)->parameters(g)});
    std::unique_ptr<nn::Optimizer> optimizer;
    if (kind == Kind::momentum)
      optimizer = std::make_unique<nn::Sgd>(groups);
    else
      optimizer = std::make_unique<nn::Rmsprop>(groups);
    train(net, *optimizer, 7, weight_of(world));
    shard::load_full_state_dict(net, plain.net.state_dict());
    shard::load_full_optimizer_state(*optimizer, plain.optimizer->state_dict());
    for (int step = 3; step < 5; ++step) {
      train(net, *optimizer, step, weight_of(world));
      train(plain.net, *plain.optimizer, step);
    }
    expect(values(shard::full_state_dict(net)) == values(plain.net.state_dict()), "weights");
    expect(values(shard::full_optimizer_state(*optimizer)) == values(plain.optimizer->state_dict()), "state");
  });
}

TEST_CASE("state that does not fit is refused on every rank, and nothing changes") {
  on_ranks([](const World& world, shard::GroupLayout layout, Kind kind) {
    if (kind == Kind::sgd) return;  // has no state
    const Plain plain(kind, 3);
    Net net = seeded_net();
    shard_net(net, world, layout);
    const auto optimizer = optimizer_of(kind, net);
    for (int step = 0; step < 2; ++step) train(net, *optimizer, step, weight_of(world));
    const Values before = values(shard::full_optimizer_state(*optimizer));
    const auto refused = [&](const std::function<void(nn::StateDict&)>& spoil, const char* part) {
      nn::StateDict state = plain.optimizer->state_dict();
      spoil(state);
      std::string message;
      try {
        shard::load_full_optimizer_state(*optimizer, state);
      } catch (const Error& error) {
        message = error.what();
      }
      expect(message.find(part) != std::string::npos, "'{}' in '{}'", part, message);
    };
    refused([](nn::StateDict& state) { first_entry(state)->second = zeros({2, 5}); }, "has shape (2, 5)");
    refused([](nn::StateDict& state) { state.erase(first_entry(state) + 1); }, "lacks 'state.0.");
    refused(
        [](nn::StateDict& state) {
          for (const int i : {77, 76}) state.emplace_back(fmt::format("state.{}.step", i), zeros({}));
        },
        "belong to no parameter here, among them 'state.76.step'");
    refused([](nn::StateDict& state) { state.erase(state.begin()); }, "no rate for group 0");
    expect(values(shard::full_optimizer_state(*optimizer)) == before, "the state changed");
  });
}

// ---- flat parameters ----

namespace {

/// Parameters of the root's own before, between and after units, some of one shape; a tie across units.
struct Mixed final : nn::Layer<Mixed> {
  nn::Param scale{ones({5})};
  nn::Linear first{5, 5};
  nn::Param shift{zeros({5})};
  nn::ModuleList<nn::Linear> rest;
  nn::Param last{ones({1})};
  Mixed() {
    for (int i = 0; i < 2; ++i) rest.emplace_back(5, 5);
    nn::tie(first.weight, rest[1].weight);
  }
  Tensor forward(const Tensor& x) const {
    Tensor y = add(first(mul(x, scale)), shift);
    for (const nn::Linear& layer : rest) y = layer(gelu(y));
    return mul(sum(square(y)), last);
  }
  void visit(auto&& on) {
    on("scale", scale);
    on("first", first);
    on("shift", shift);
    on("rest", rest);
    on("last", last);
  }
};

Mixed seeded_mixed() {
  manual_seed(5);
  return {};
}

/// The layers in a group of their own rate, and what is left.
std::unique_ptr<nn::Optimizer> grouped_optimizer_of(Kind kind, const std::vector<nn::Parameter>& params) {
  nn::ParamGroup group{params, 0.05};
  if (kind == Kind::adamw) return std::make_unique<nn::AdamW>(std::vector{group});
  if (kind == Kind::rmsprop)
    return std::make_unique<nn::Rmsprop>(std::vector{group}, nn::RmspropOptions{.centered = true});
  return std::make_unique<nn::Sgd>(std::vector{group},
                                   nn::SgdOptions{.momentum = kind == Kind::momentum ? 0.9 : 0.0});
}

void step(Mixed& net, nn::Optimizer& optimizer, int number, double weight = 1) {
  manual_seed(100 + static_cast<std::uint64_t>(number));
  mul(sum(net(rand({4, 5}))), weight).backward();
  optimizer.step();
  optimizer.zero_grad();
}

struct PlainMixed {
  Mixed net = seeded_mixed();
  std::unique_ptr<nn::Optimizer> optimizer;
  PlainMixed(Kind kind, int steps) : optimizer(grouped_optimizer_of(kind, net.parameters())) {
    for (int i = 0; i < steps; ++i) step(net, *optimizer, i);
  }
};

/// The defaults of FullyShardedDataParallel, as one unit or with the layers as units of their own.
shard::FsdpOptions defaults(bool wrap) {
  shard::FsdpOptions options;
  if (wrap) options.auto_wrap = shard::wrap_classes({"Linear"});
  return options;
}

template <class F>
void on_flat_ranks(const F& body) {
  for (const int ranks : {1, 2, 4})
    for (const bool wrap : {false, true})
      for (const Kind kind : kinds) {
        INFO(ranks << " ranks, " << (wrap ? "layers wrapped" : "one unit") << ", optimizer "
                   << static_cast<int>(kind));
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) { body(world, wrap, kind); }));
      }
}

void expect_state(const nn::Optimizer& optimizer, const nn::Optimizer& plain, const char* when) {
  const nn::StateDict full = shard::full_optimizer_state(optimizer), wanted = plain.state_dict();
  expect(full.size() == wanted.size(), "{}: {} entries of {}", when, full.size(), wanted.size());
  for (std::size_t i = 0; i < full.size(); ++i) {
    expect(full[i].first == wanted[i].first, "{}: entry {} is {}", when, i, full[i].first);
    expect(full[i].second.shape() == wanted[i].second.shape(), "{}: shape of {}", when, full[i].first);
  }
  expect(values(full) == values(wanted), "{}: values", when);
}

}  // namespace

TEST_CASE("the state of an optimizer with a parameter that was replaced is refused by its name") {
  on_ranks([](const World& world, shard::GroupLayout layout, Kind kind) {
    for (const bool taken_in : {false, true}) {
      Net net = seeded_net();
      shard_net(net, world, layout);
      const auto optimizer = optimizer_of(kind, net);
      train(net, *optimizer, 0, weight_of(world));
      const nn::StateDict whole = shard::full_optimizer_state(net, *optimizer),
                          local = shard::local_optimizer_state(net, *optimizer);
      const shard::ShardedStateDict parts = shard::sharded_optimizer_state(*optimizer);
      net.last.weight = nn::Parameter(clone(net.last.weight.local().detach()));
      if (taken_in) shard::full_state_dict(net);
      const std::function<void()> calls[] = {
          [&] { shard::full_optimizer_state(*optimizer); },
          [&] { shard::full_optimizer_state(net, *optimizer); },
          [&] { shard::sharded_optimizer_state(*optimizer); },
          [&] { shard::sharded_optimizer_state(net, *optimizer); },
          [&] { shard::local_optimizer_state(net, *optimizer); },
          [&] { shard::load_full_optimizer_state(*optimizer, whole); },
          [&] { shard::load_full_optimizer_state(net, *optimizer, whole); },
          [&] { shard::load_sharded_optimizer_state(*optimizer, parts, world.group()); },
          [&] { shard::load_local_optimizer_state(net, *optimizer, local); },
          [&] { shard::save_checkpoint(net, *optimizer, "never", world.group()); }};
      for (const auto& call : calls) {
        const std::string message = message_of<StateError>(call);
        expect(message.find("'last.weight' was replaced") != std::string::npos, "it said '{}'", message);
      }
      const auto anew = optimizer_of(kind, net);
      shard::load_full_optimizer_state(net, *anew, whole);
      expect(values(shard::full_optimizer_state(net, *anew)) == values(whole), "by an optimizer made anew");
    }
  });
}

TEST_CASE("flat parameters: the gathered state of an optimizer is that of the unsharded run") {
  on_flat_ranks([](const World& world, bool wrap, Kind kind) {
    for (const int steps : {0, 2}) {
      const PlainMixed plain(kind, steps);
      Mixed net = seeded_mixed();
      const shard::FullyShardedDataParallel handle(net, defaults(wrap));
      for (const nn::NamedParameter& p : net.named_parameters())
        expect(p.name.ends_with("_flat_param"), "'{}' is listed beside its flat parameter", p.name);
      const auto optimizer = grouped_optimizer_of(kind, net.parameters());
      for (int i = 0; i < steps; ++i) step(net, *optimizer, i, weight_of(world));
      expect_state(*optimizer, *plain.optimizer, "after steps");
    }
  });
}

TEST_CASE("flat parameters: whole state goes in, and training goes on to the same bits in any layout") {
  on_flat_ranks([](const World& world, bool wrap, Kind kind) {
    PlainMixed plain(kind, 2);
    Mixed net = seeded_mixed();
    const shard::FullyShardedDataParallel handle(net, defaults(wrap));
    const auto optimizer = grouped_optimizer_of(kind, net.parameters());
    shard::load_full_state_dict(net, plain.net.state_dict());
    shard::load_full_optimizer_state(*optimizer, plain.optimizer->state_dict());
    for (int i = 2; i < 4; ++i) {
      step(net, *optimizer, i, weight_of(world));
      step(plain.net, *plain.optimizer, i);
    }
    expect(values(shard::full_state_dict(net)) == values(plain.net.state_dict()), "weights");
    expect_state(*optimizer, *plain.optimizer, "after loading");

    Mixed rows = seeded_mixed();
    shard::fully_shard(rows.first);
    shard::fully_shard(rows);
    const auto other = grouped_optimizer_of(kind, rows.parameters());
    shard::load_full_optimizer_state(*other, shard::full_optimizer_state(*optimizer));
    expect_state(*other, *plain.optimizer, "in the per-parameter layout");

    Mixed copy = net.clone();
    const auto cloned = grouped_optimizer_of(kind, copy.parameters());
    shard::load_full_optimizer_state(*cloned, plain.optimizer->state_dict());
    expect_state(*cloned, *plain.optimizer, "of a clone");
  });
}

TEST_CASE("flat parameters: state that one step count cannot hold is refused, and nothing changes") {
  on_flat_ranks([](const World& world, bool wrap, Kind kind) {
    if (kind == Kind::sgd) return;  // has no state
    const PlainMixed plain(kind, 2);
    Mixed net = seeded_mixed();
    const shard::FullyShardedDataParallel handle(net, defaults(wrap));
    const auto optimizer = grouped_optimizer_of(kind, net.parameters());
    step(net, *optimizer, 0, weight_of(world));
    const Values before = values(shard::full_optimizer_state(*optimizer));
    const auto refused = [&](const std::function<void(nn::StateDict&)>& spoil, const char* part) {
      nn::StateDict state = plain.optimizer->state_dict();
      spoil(state);
      std::string message;
      try {
        shard::load_full_optimizer_state(*optimizer, state);
      } catch (const ValueError& error) {
        message = error.what();
      } catch (const ShapeError& error) {
        message = error.what();
      }
      expect(message.find(part) != std::string::npos, "'{}' in '{}'", part, message);
    };
    if (kind != Kind::rmsprop)  // which counts none
      refused(
          [](nn::StateDict& state) {
            for (auto& [name, t] : state)
              if (name == "state.0.step") t = Tensor::scalar(9, {f64});
          },
          "9 and 2 steps");
    refused([](nn::StateDict& state) { first_entry(state)->second = zeros({2, 5}); }, "has shape (2, 5)");
    refused([](nn::StateDict& state) { state.erase(first_entry(state) + 1); }, "lacks 'state.0.");
    refused([](nn::StateDict& state) { state.emplace_back("state.77.step", zeros({})); },
            "belong to no parameter");
    expect(values(shard::full_optimizer_state(*optimizer)) == before, "the state changed");

    // Without state a parameter is one whose gradients were 0.
    nn::StateDict part = plain.optimizer->state_dict();
    std::erase_if(part, [](const auto& entry) { return entry.first.starts_with("state.0."); });
    shard::load_full_optimizer_state(*optimizer, part);
    Values wanted = values(plain.optimizer->state_dict());
    for (auto& [name, list] : wanted)
      if (name.starts_with("state.0.") && !name.ends_with("step")) std::ranges::fill(list, 0);
    expect(values(shard::full_optimizer_state(*optimizer)) == wanted, "a parameter without state");
  });
}

TEST_CASE("flat parameters: they are no single parameter to gather or to cut") {
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    Mixed net = seeded_mixed();
    const shard::FullyShardedDataParallel handle(net);
    const nn::Parameter flat = handle.flat_param();
    for (const auto& call : {std::function<void()>([&] { shard::gather_whole(flat, flat.local().detach()); }),
                             std::function<void()>([&] { shard::part_of(flat, ones({3})); })}) {
      std::string message;
      try {
        call();
      } catch (const ValueError& error) {
        message = error.what();
      }
      expect(message.find("flat parameter") != std::string::npos, "it said '{}'", message);
    }
  }));
}

// ---- by name ----

namespace {

/// The same parameters in one group, the last ones first.
std::unique_ptr<nn::Optimizer> turned_round(const Net& net) {
  std::vector<nn::Parameter> params = net.parameters();
  std::ranges::reverse(params);
  return std::make_unique<nn::AdamW>(params, nn::AdamWOptions{});
}

Values without_rates(Values all) {
  std::erase_if(all, [](const auto& entry) { return entry.first.starts_with("group."); });
  return all;
}

}  // namespace

TEST_CASE("a state by name is that by number, under the names of the unsharded model") {
  on_ranks([](const World& world, shard::GroupLayout layout, Kind kind) {
    Plain plain(kind, 3);
    Net net = seeded_net();
    shard_net(net, world, layout);
    const auto optimizer = optimizer_of(kind, net);
    for (int step = 0; step < 3; ++step) train(net, *optimizer, step, weight_of(world));
    const nn::StateDict named = shard::full_optimizer_state(net, *optimizer),
                        of_plain = shard::full_optimizer_state(plain.net, *plain.optimizer),
                        numbered = shard::full_optimizer_state(*optimizer);
    expect(values(named) == values(of_plain), "sharded or not");
    expect(named.size() == numbered.size(), "{} entries of {}", named.size(), numbered.size());
    for (std::size_t i = 0; i < named.size(); ++i)
      expect(to(named[i].second, f64).to_vector<double>() == to(numbered[i].second, f64).to_vector<double>(),
             "'{}' is not '{}'", named[i].first, numbered[i].first);
    if (kind == Kind::adamw)
      expect(values(named).contains("state.spare.bias.exp_avg_sq"), "names are {}", named.back().first);
    const shard::ShardedStateDict parts = shard::sharded_optimizer_state(net, *optimizer);
    expect(parts.size() == named.size(), "{} parts", parts.size());
    for (std::size_t i = 0; i < parts.size(); ++i)
      expect(parts[i].name == named[i].first, "part '{}'", parts[i].name);
  });
}

TEST_CASE("states by name load whatever order, groups and layout they come from, and those by number still") {
  for (const int ranks : {1, 2, 4})
    for (const shard::GroupLayout from : layouts)
      for (const shard::GroupLayout into : layouts)
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          Net net = seeded_net();
          shard_net(net, world, from);
          const auto optimizer = turned_round(net);
          for (int step = 0; step < 3; ++step) train(net, *optimizer, step, weight_of(world));
          const nn::StateDict named = shard::full_optimizer_state(net, *optimizer);
          const Values expected = without_rates(values(named));
          const auto expect_loaded = [&](const char* what, const auto& make, const auto& load) {
            Net other = seeded_net();
            shard_net(other, world, into);
            const auto its = make(other);
            load(other, *its);
            const Values found = values(shard::full_optimizer_state(other, *its));
            expect(without_rates(found) == expected, "{}", what);
          };
          const auto in_order = [](const Net& n) {
            return std::make_unique<nn::AdamW>(n.parameters(), nn::AdamWOptions{});
          };
          expect_loaded("whole", in_order,
                        [&](Net& n, nn::Optimizer& o) { shard::load_full_optimizer_state(n, o, named); });
          const shard::ShardedStateDict parts = shard::sharded_optimizer_state(net, *optimizer);
          expect_loaded("in parts", in_order, [&](Net& n, nn::Optimizer& o) {
            shard::load_sharded_optimizer_state(n, o, parts, world.group());
          });
          const nn::StateDict numbered = shard::full_optimizer_state(*optimizer);
          expect_loaded("whole, by number", turned_round,
                        [&](Net& n, nn::Optimizer& o) { shard::load_full_optimizer_state(n, o, numbered); });
          const shard::ShardedStateDict numbered_parts = shard::sharded_optimizer_state(*optimizer);
          expect_loaded("in parts, by number", turned_round, [&](Net& n, nn::Optimizer& o) {
            shard::load_sharded_optimizer_state(n, o, numbered_parts, world.group());
          });
          if (from != into) return;
          const nn::StateDict local = shard::local_optimizer_state(net, *optimizer);
          expect_loaded("as it lies", in_order,
                        [&](Net& n, nn::Optimizer& o) { shard::load_local_optimizer_state(n, o, local); });
          expect_loaded("as it lies, by number", turned_round, [&](Net& n, nn::Optimizer& o) {
            shard::load_local_optimizer_state(n, o, optimizer->state_dict());
          });
        }));
}

TEST_CASE("parameters in a flat one have their names in whole states, and it has its own in this rank's") {
  for (const int ranks : {1, 3})
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      const auto wrapped = [&](Net& net) {
        const shard::FullyShardedDataParallel handle(
            net, {.mesh = world.mesh(), .auto_wrap = shard::wrap_classes({"Linear"})});
        return std::make_unique<nn::AdamW>(net.parameters(), nn::AdamWOptions{});
      };
      Net net = seeded_net(), plain = seeded_net();
      const auto optimizer = wrapped(net);
      const auto of_plain = turned_round(plain);
      for (int step = 0; step < 3; ++step) {
        train(net, *optimizer, step);
        train(plain, *of_plain, step);
      }
      const nn::StateDict named = shard::full_optimizer_state(net, *optimizer);
      const auto names = [](const nn::StateDict& state) {
        std::set<std::string> all;
        for (const auto& [name, tensor] : state) all.insert(name);
        return all;
      };
      expect(names(named) == names(shard::full_optimizer_state(plain, *of_plain)), "names");
      const nn::StateDict local = shard::local_optimizer_state(net, *optimizer);
      expect(names(local).contains("state.first._flat_param.exp_avg"), "{}", local.back().first);
      Net other = seeded_net();
      const auto its = wrapped(other);
      shard::load_local_optimizer_state(other, *its, local);
      expect(values(shard::full_optimizer_state(other, *its)) == values(named), "loaded");
    }));
}

TEST_CASE("flat parameters: an optimizer over a module and its clone lists one after the other") {
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    Net by_hand = seeded_net(), net = seeded_net();
    const shard::FullyShardedDataParallel handle(net, {.auto_wrap = shard::wrap_classes({"Linear"})});
    Net hand_copy = by_hand.clone(), copy = net.clone();
    const auto of_both = [](const Net& a, const Net& b) {
      std::vector<nn::Parameter> all = a.parameters();
      std::ranges::copy(b.parameters(), std::back_inserter(all));
      return std::make_unique<nn::Sgd>(all, nn::SgdOptions{.momentum = 0.9});
    };
    const auto optimizer = of_both(net, copy), reference = of_both(by_hand, hand_copy);
    for (auto [a, b, o] :
         {std::tuple(&net, &copy, optimizer.get()), std::tuple(&by_hand, &hand_copy, reference.get())}) {
      manual_seed(5);
      const Tensor x = rand({4, 5});
      a->use_spare = b->use_spare = true;
      (*a)(x).backward();
      mul((*b)(x), 10.0).backward();
      o->step();
    }
    const nn::StateDict full = shard::full_optimizer_state(*optimizer), expected = reference->state_dict();
    expect(full.size() == expected.size(), "{} entries", full.size());
    for (const auto& [name, tensor] : expected) {
      const auto found = std::ranges::find(full, name, &std::pair<std::string, Tensor>::first);
      expect(
          found != full.end() && found->second.shape() == tensor.shape() &&
              to(found->second, DType::f64).to_vector<double>() == to(tensor, DType::f64).to_vector<double>(),
          "'{}'", name);
    }
  }));
}
