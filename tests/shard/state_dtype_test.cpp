// States of optimizers that keep another dtype than their parameters': f32 masters of 16-bit parameters.
#include "nn/optimizer.h"
#include "shard/checkpoint.h"
#include "shard/optimizer_state.h"
#include "shard/sharded_state.h"
#include "tests/catch.h"
#include "tests/ranks.h"
#include "tests/sanitizer.h"
#include "tests/shard/nets.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr shard::GroupLayout layouts[] = {shard::GroupLayout::per_parameter, shard::GroupLayout::flat};

struct Run {
  Net net;
  std::optional<nn::AdamW> optimizer;
  explicit Run(shard::GroupLayout layout) {
    net.to(bf16);
    shard_blocks_and_rest(net, {.layout = layout});
    optimizer.emplace(net.parameters(), nn::AdamWOptions{.lr = 1e-2, .masters = nn::Masters::in_f32});
  }
  void train(const World& world, int from, int to_step) {
    for (int step = from; step < to_step; ++step) {
      const Batch batch = batch_of(world.rank(), step, net.width);
      mean(square(sub(to(net(to(batch.x, bf16)), f32), batch.target))).backward();
      optimizer->step();
      optimizer->zero_grad();
    }
  }
};

/// Every entry in its own dtype.
std::vector<std::pair<DType, std::vector<double>>> values(const nn::StateDict& state) {
  std::vector<std::pair<DType, std::vector<double>>> all;
  for (const auto& [name, tensor] : state)
    all.emplace_back(tensor.dtype(), to(tensor, f64).to_vector<double>());
  return all;
}

}  // namespace

TEST_CASE("f32 masters of bf16 parameters go through every state and training goes on to the same bits") {
  enum class Way { whole, by_name, local, sharded, checkpoint };
  for (const int ranks : worlds())
    for (const shard::GroupLayout from : layouts)
      for (const shard::GroupLayout into : layouts)
        for (const Way way : {Way::whole, Way::by_name, Way::local, Way::sharded, Way::checkpoint}) {
          if (way == Way::local && from != into) continue;  // a rank's part is of one layout
          INFO(ranks << " ranks, layout " << int(from) << " to " << int(into) << ", way " << int(way));
          const TempDirectory folder;
          CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
            Run run(from), other(into);
            run.train(world, 0, 3);
            if (way == Way::checkpoint) {
              shard::save_checkpoint(run.net, *run.optimizer, folder.path() / "run", world.group());
              shard::load_checkpoint(other.net, *other.optimizer, folder.path() / "run", world.group());
            } else {
              shard::load_full_state_dict(other.net, shard::full_state_dict(run.net));
              nn::Optimizer &of = *run.optimizer, &to = *other.optimizer;
              if (way == Way::whole) shard::load_full_optimizer_state(to, shard::full_optimizer_state(of));
              if (way == Way::by_name)
                shard::load_full_optimizer_state(other.net, to, shard::full_optimizer_state(run.net, of));
              if (way == Way::local)
                shard::load_local_optimizer_state(other.net, to, shard::local_optimizer_state(run.net, of));
              if (way == Way::sharded)
                shard::load_sharded_optimizer_state(
                    other.net, to, shard::sharded_optimizer_state(run.net, of), world.group());
            }
            const auto state = values(shard::full_optimizer_state(run.net, *run.optimizer));
            expect(state == values(shard::full_optimizer_state(other.net, *other.optimizer)), "the state");
            expect(std::ranges::count(state, f32, &std::pair<DType, std::vector<double>>::first) > 0,
                   "no entry is f32");
            run.train(world, 3, 6);
            other.train(world, 3, 6);
            expect(values(shard::full_state_dict(run.net)) == values(shard::full_state_dict(other.net)),
                   "the parameters, three steps later");
          }));
        }
}

TEST_CASE("a rank's state brings the options that its momentum is kept for, by name and by number") {
  for (const int ranks : {1, 2})
    for (const shard::GroupLayout layout : layouts)
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Net net;
        shard_blocks_and_rest(net, {.layout = layout});
        nn::Sgd saved(net.parameters(), {.lr = 0.1, .momentum = 0.9});
        loss_of(net, batch_of(world.rank(), 0, net.width)).backward();
        saved.step();
        const nn::StateDict local = shard::local_optimizer_state(net, saved);
        for (const bool named : {true, false}) {
          nn::Sgd plain(net.parameters(), {.lr = 0.1});
          if (named)
            shard::load_local_optimizer_state(net, plain, local);
          else
            plain.load_state_dict(saved.state_dict());
          expect(values(plain.state_dict()) == values(saved.state_dict()), "named {}", named);
        }
      }));
}
