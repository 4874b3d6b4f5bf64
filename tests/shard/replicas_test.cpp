// Shards with replicas: the average over all ranks is made in two calls, and is what one call gives.
#include <array>

#include "autograd/autograd.h"
#include "collectives/observe.h"
#include "shard/fully_shard.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// Weights of 1, so that gradients are what comes in; the last ones on some ranks only.
struct Scale final : nn::Layer<Scale> {
  nn::Param weight, rarely;
  explicit Scale(DType dtype) : weight(ones({7}, {dtype})), rarely(ones({5}, {dtype})) {}
  Tensor forward(const Tensor& x, bool all) const {
    const Tensor y = sum(mul(x, weight));
    return all ? add(y, sum(mul(narrow(x, 0, 0, 5), rarely))) : y;
  }
  void visit(auto&& on) {
    on("weight", weight);
    on("rarely", rarely);
  }
};

struct Grid {
  int replicas, shards;
};
constexpr std::array grids = {Grid{2, 2}, Grid{2, 3}, Grid{3, 2}, Grid{4, 1}, Grid{1, 4}};

/// Values whose sums f32 holds, also over all ranks, if the terms were rounded to `reduce`: integers, and
/// numbers of one magnitude.
Tensor exact_values(int rank, bool integers, DType reduce, DType dtype) {
  manual_seed(static_cast<std::uint64_t>(rank + 17));
  const bool few_bits = reduce == f16 || reduce == bf16;
  return to(integers || !few_bits ? to(randint(-999, 999, {7}), f32) : rand({7}, {}, 1, 2), dtype);
}

}  // namespace

TEST_CASE("shards with replicas average once: equal to the bit to as many shards, where sums are exact") {
  struct Precision {
    DType stored, reduce;
  };
  for (const Grid grid : grids)
    for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
      for (const Precision p : {Precision{f32, f32}, Precision{f32, bf16}, Precision{f32, f16},
                                Precision{f64, f64}, Precision{bf16, bf16}, Precision{f16, f32}})
        for (const bool integers : {true, false}) {
          INFO(grid.replicas << " x " << grid.shards << ", " << name_of(p.stored) << " reduced in "
                             << name_of(p.reduce));
          CHECK_NOTHROW(run_ranks(grid.replicas * grid.shards, [&](World& world) {
            const DeviceMesh mesh = world.mesh({grid.replicas, grid.shards}, {"replica", "shard"});
            const auto gradients_over = [&](const DeviceMesh& ranks, const Group& shards) {
              Scale net(p.stored);
              shard::fully_shard(
                  net, {.mesh = ranks, .layout = layout, .mixed_precision = {.reduce_dtype = p.reduce}});
              const Tensor x = exact_values(world.rank(), integers, p.reduce, p.stored);
              {
                const auto guard = shard::no_sync(net);
                net(x, false).backward();
              }
              net(x, world.rank() == world.size() - 1).backward();
              return whole_gradients(net, shards);
            };
            const std::string found = difference(gradients_over(mesh, mesh.group("shard")),
                                                 gradients_over(world.mesh(), world.group()));
            expect(found.empty(), "{}", found);
          }));
        }
}

TEST_CASE("the second calls of reductions come after all first ones, whatever is here before",
          "[threads meet]") {
  for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
    CHECK_NOTHROW(run_ranks(4, [&](World& world) {
      nn::Sequential net(nn::Linear(5, 5), nn::Linear(5, 5), nn::Linear(5, 5));
      const shard::Options options{.mesh = world.mesh({2, 2}, {"replica", "shard"}), .layout = layout};
      for (std::size_t i = 0; i < 3; ++i) shard::fully_shard(net[i], options);
      shard::fully_shard(net, options);
      // What comes out of the first layer has its gradient when the last layer's is on its way on all ranks.
      struct Meet final : nn::ModuleObserver {
        const Group* group = nullptr;
        void after_forward(nn::Module&, std::span<Tensor* const> outputs) override {
          register_hook(*outputs[0], [this](const Tensor& g) {
            group->barrier({.channel = 9});
            return g;
          }).keep();
        }
      } meet;
      meet.group = &world.group();
      const Subscription subscription = net[0].observe(meet);
      const OrderLog log;
      sum(net(batch_of(world.rank(), 0, 5).x)).backward();
      std::string posted;  // S: over shards, R: over replicas
      for (const std::string& line : log.lines()) {
        if (line.find("reduce_scatter") != std::string::npos) posted += 'S';
        if (line.find("all_reduce") != std::string::npos) posted += 'R';
      }
      expect(posted == "SSSRRR", "posted {}", posted);
    }));
}
