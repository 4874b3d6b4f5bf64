// Backward hooks of modules, on sharded ones as on plain ones; and what is frozen and thawed between steps.
#include "autograd/autograd.h"
#include "nn/compile.h"
#include "nn/hooks.h"
#include "runtime/ops.h"
#include "shard/fsdp.h"
#include "shard/fully_shard.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

using Values = std::vector<std::vector<float>>;
using Shard = std::function<void(Net&)>;

template <class F>
void on_all_ways(F&& body) {
  using enum shard::ShardingStrategy;
  for (const int ranks : {1, 2, 3})
    for (const shard::ShardingStrategy strategy : {full_shard, shard_grad_op, zero1, no_shard})
      for (const int way : {0, 1, 2}) {
        INFO(ranks << " ranks, strategy " << static_cast<int>(strategy) << ", way " << way);
        const Shard shard = [=](Net& net) {
          if (way == 2)
            shard::FullyShardedDataParallel(
                net,
                {.strategy = strategy, .auto_wrap = shard::wrap_classes({"Block"}), .use_orig_params = true});
          else
            shard_blocks_and_rest(
                net, {.layout = way == 0 ? shard::GroupLayout::per_parameter : shard::GroupLayout::flat,
                      .strategy = strategy});
        };
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) { body(world, shard); }));
      }
}

/// Notes what comes, and doubles the gradients of the inputs.
nn::FullBackwardHook noting(Values& seen) {
  return [&seen](std::span<const Tensor> grad_input, std::span<const Tensor> grad_output) {
    std::vector<Tensor> doubled;
    for (const Tensor& g : grad_output) seen.push_back(g.to_vector<float>());
    for (const Tensor& g : grad_input) {
      seen.push_back(g.defined() ? g.to_vector<float>() : std::vector<float>{});
      doubled.push_back(g.defined() ? mul(g, 2) : g);
    }
    return doubled;
  };
}

}  // namespace

TEST_CASE("full backward hooks see and change on sharded modules what they do on plain ones") {
  for (const Recomputed recomputed : {Recomputed::no, Recomputed::inside, Recomputed::blocks})
    on_all_ways([recomputed](World& world, const Shard& shard) {
      Net net({.uneven = true, .recomputed = recomputed}), by_hand({.uneven = true});
      shard(net);
      Values seen, expected;
      const auto hook = [](Net& n, Values& values) {
        std::vector<nn::ModuleHook> hooks;
        for (nn::Module* m :
             std::vector<nn::Module*>{&n, &n.embed, &n.blocks[0], &n.blocks[1].in, &n.blocks[2]})
          hooks.push_back(nn::register_full_backward_hook(*m, noting(values)));
        return hooks;
      };
      std::vector<nn::ModuleHook> of_net = hook(net, seen), of_by_hand = hook(by_hand, expected);
      for (const int step : {0, 1, 2}) {
        net.zero_grad();
        if (step == 2) {
          of_net[2].reset();
          of_by_hand[2].reset();
        }
        loss_at(net, world.rank(), step).backward();
        Values own;
        const Gradients average = average_by_hand(by_hand, world.size(), [&](int rank) {
          expected.clear();
          loss_at(by_hand, rank, step).backward();
          if (rank == world.rank()) own = expected;
        });
        expect(seen == own && !own.empty(), "step {}: {} gradients, not {}", step, seen.size(), own.size());
        seen.clear();
        expect_gradients(net, world, average, "with doubled ones");
      }
    });
}

TEST_CASE(
    "a full backward hook runs once a forward, without a gradient of inputs too, and not without grad") {
  nn::Linear layer(3, 2);
  int calls = 0;
  bool input_wants = false;
  const nn::ModuleHook hook = nn::register_full_backward_hook(
      layer, [&](std::span<const Tensor> grad_input, std::span<const Tensor> grad_output) {
        ++calls;
        CHECK(grad_input.size() == 1);
        CHECK(grad_input[0].defined() == input_wants);
        CHECK(grad_output[0].to_vector<float>() == std::vector<float>(8, 1));
        return std::vector<Tensor>{};
      });
  for (const bool wants : {false, true}) {
    input_wants = wants;
    Tensor x = ones({4, 3});
    if (wants) x.requires_grad_();
    add(sum(layer(x)), sum(layer(x))).backward();
    CHECK(calls == (wants ? 4 : 2));
    if (wants) CHECK(x.grad().defined());
  }
  {
    const NoGrad guard;
    layer(ones({4, 3}));
  }
  const nn::ModuleHook wrong = nn::register_full_backward_hook(
      layer, [](auto, auto) { return std::vector<Tensor>{ones({4, 2}), ones({1})}; });
  CHECK_THROWS_AS(sum(layer(ones({4, 3}).requires_grad_())).backward(), ValueError);
}

TEST_CASE("what is frozen and thawed between steps trains as if by hand") {
  on_all_ways([](World& world, const Shard& shard) {
    Net net({.uneven = true}), by_hand({.uneven = true});
    shard(net);
    nn::Adam adam(net.parameters()), reference(by_hand.parameters());
    for (const int step : {0, 1, 2, 3, 4}) {
      for (Net* n : {&net, &by_hand}) {
        n->blocks[1].set_requires_grad(step != 1 && step != 2);
        n->blocks[0].in.set_requires_grad(step % 2 == 0);
        n->head.set_requires_grad(step != 3);
      }
      adam.zero_grad();
      loss_at(net, world.rank(), step).backward();
      const Gradients average = plain(by_hand, world, step);
      set_gradients(by_hand, average);
      adam.step();
      reference.step();
      expect_values(net, by_hand, "after a step");
    }
  });
}

namespace {

struct Asked final : nn::Layer<Asked> {
  nn::Linear linear{4, 4};
  std::function<void()> ask{};
  Tensor forward(const Tensor& x) const {
    if (ask) ask();
    return tanh(linear(x));
  }
  void visit(auto&& on) { on("linear", linear); }
};
struct AskedTwice final : nn::Layer<AskedTwice> {
  Asked first, second;
  Tensor forward(const Tensor& x) const { return second(first(x)); }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
  }
};

}  // namespace

TEST_CASE("phase_of says what a module's rank does, whoever asks, eagerly and by programs") {
  using enum shard::ShardingStrategy;
  using shard::Phase, shard::phase_of;
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const shard::ShardingStrategy strategy : {full_shard, shard_grad_op, zero1, no_shard})
      for (const std::optional<ShardingHooks> hooks :
           {std::optional<ShardingHooks>{}, std::optional(ShardingHooks::around),
            std::optional(ShardingHooks::inside)}) {
        AskedTwice net;
        const shard::Options options{.mesh = world.mesh(), .layout = layout, .strategy = strategy};
        expect_refused<StateError>([&] { phase_of(net); }, "phase_of: AskedTwice is not sharded");
        shard::fully_shard(net.first, options);
        shard::fully_shard(net.second, options);
        shard::fully_shard(net, options);
        std::vector<std::array<Phase, 3>> seen;  // of the root, the first and the second
        const auto now = [&] { return std::array{phase_of(net), phase_of(net.first), phase_of(net.second)}; };
        net.first.ask = net.second.ask = [&] { seen.push_back(now()); };
        if (hooks) nn::compile(net, {.sharding_hooks = *hooks});
        const Subscription of_second =
            register_hook(net.second.linear.weight.tensor(),
                          [&](const Tensor&) -> Tensor { return seen.push_back(now()), Tensor(); });
        const Subscription of_first =
            register_hook(net.first.linear.weight.tensor(),
                          [&](const Tensor&) -> Tensor { return seen.push_back(now()), Tensor(); });
        for (int step = 0; step < 3; ++step) {
          seen.clear();
          const Tensor loss = sum(net(ones({2, 4})));
          const bool asks = !hooks || step == 0;  // programs have no ops that ask
          seen.push_back(now());
          loss.backward();
          seen.push_back(now());
          for (nn::Parameter p : net.parameters()) p.set_grad({});
          std::vector<std::array<Phase, 3>> wanted;
          if (asks)
            wanted = {{Phase::forward, Phase::forward, Phase::idle},
                      {Phase::forward, Phase::idle, Phase::forward}};
          wanted.push_back({Phase::idle, Phase::idle, Phase::idle});
          wanted.push_back({Phase::idle, Phase::backward, Phase::backward});
          wanted.push_back({Phase::idle, Phase::backward, Phase::idle});
          wanted.push_back({Phase::idle, Phase::idle, Phase::idle});
          expect(seen == wanted, "step {}: other phases", step);
        }
        net.second.ask = [] { throw std::runtime_error("asked"); };
        if (hooks) nn::compiled_programs(net).reset();
        expect_refused<std::runtime_error>([&] { net(ones({2, 4})); }, "asked");
        expect(now() == std::array{Phase::idle, Phase::idle, Phase::idle}, "not idle after an exception");
      }
  });
}
