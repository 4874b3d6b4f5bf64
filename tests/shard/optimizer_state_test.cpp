// The state of an optimizer over shards, gathered and taken apart again.
#include "shard/optimizer_state.h"

#include <map>

#include "collectives/world.h"
#include "nn/layers.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/fully_shard.h"
#include "tests/catch.h"
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

enum class Kind { adamw, sgd, momentum };
constexpr Kind kinds[] = {Kind::adamw, Kind::sgd, Kind::momentum};

std::unique_ptr<nn::Optimizer> optimizer_of(Kind kind, const Net& net) {
  nn::ParamGroup matrices{.lr = 0.1}, vectors{.lr = 0.2};
  for (const nn::Parameter& p : net.parameters())
    (p.shape().rank() == 2 ? matrices : vectors).params.push_back(p);
  if (kind == Kind::adamw)
    return std::make_unique<nn::AdamW>(std::vector{matrices, vectors}, nn::AdamWOptions{});
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

void shard_net(Net& net, const World& world, shard::Layout layout) {
  const shard::Options options{.mesh = world.mesh(), .layout = layout};
  shard::fully_shard(net.first, options);
  shard::fully_shard(net, options);
}

/// The whole loss lies on rank 0, so that an average over a power of two rounds nothing.
double weight_of(const World& world) { return world.rank() == 0 ? world.size() : 0; }

constexpr shard::Layout layouts[] = {shard::Layout::flat, shard::Layout::per_parameter};

/// `body(world, layout, kind)` on every rank.
void on_ranks(const std::function<void(const World&, shard::Layout, Kind)>& body) {
  for (const int ranks : {1, 2, 4, 8})
    for (const shard::Layout layout : layouts)
      for (const Kind kind : kinds) {
        INFO(ranks << " ranks, layout " << static_cast<int>(layout) << ", optimizer "
                   << static_cast<int>(kind));
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) { body(world, layout, kind); }));
      }
}

}  // namespace

TEST_CASE("the gathered state of an optimizer is that of the unsharded run") {
  on_ranks([](const World& world, shard::Layout layout, Kind kind) {
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
  on_ranks([](const World& world, shard::Layout layout, Kind kind) {
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

TEST_CASE("state that does not fit is refused on every rank, and nothing changes") {
  on_ranks([](const World& world, shard::Layout layout, Kind kind) {
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
    refused([](nn::StateDict& state) { state[1].second = zeros({2, 5}); }, "has shape (2, 5)");
    refused([](nn::StateDict& state) { state.erase(state.begin() + 2); }, "lacks 'state.0.");
    refused([](nn::StateDict& state) { state.emplace_back("state.77.step", zeros({})); },
            "belong to no parameter");
    refused([](nn::StateDict& state) { state.erase(state.begin()); }, "no rate for group 0");
    expect(values(shard::full_optimizer_state(*optimizer)) == before, "the state changed");
  });
}
