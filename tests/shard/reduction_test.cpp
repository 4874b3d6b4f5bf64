// What programs may say of reductions: when sums go on to replicas, and what they are divided by.
#include "autograd/autograd.h"
#include "collectives/observe.h"
#include "shard/fsdp.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// Weights of 1, so that gradients are what comes in; the last ones may be left out.
struct Scale final : nn::Layer<Scale> {
  nn::Param weight{ones({7})}, rarely{ones({5})};
  Tensor forward(const Tensor& x, bool all) const {
    const Tensor y = sum(mul(x, weight));
    return all ? add(y, sum(mul(narrow(x, 0, 0, 5), rarely))) : y;
  }
  void visit(auto&& on) {
    on("weight", weight);
    on("rarely", rarely);
  }
};

/// Two groups, of which one may be left out.
struct Two final : nn::Layer<Two> {
  Scale first, second;
  Tensor forward(const Tensor& x, bool both, bool all = true) {
    const Tensor y = first(x, all);
    return both ? add(y, second(x, true)) : y;
  }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
  }
};

/// Integers, so that sums are exact in any order.
Tensor integers(int rank, int step) {
  manual_seed(static_cast<std::uint64_t>(100 * step + rank + 1));
  return to(randint(-99, 99, {7}), f32);
}

struct Grid {
  int replicas, shards;
};

/// Runs `body(world, options, grid)` for every grid, layout and reduce dtype.
template <class F>
void on_grids(F&& body) {
  for (const Grid grid : {Grid{2, 2}, Grid{2, 3}, Grid{3, 2}, Grid{4, 1}, Grid{1, 4}, Grid{1, 1}})
    for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
      for (const DType reduce : {f32, bf16}) {
        INFO(grid.replicas << " x " << grid.shards << ", layout " << static_cast<int>(layout)
                           << ", reduced in " << name_of(reduce));
        CHECK_NOTHROW(run_ranks(grid.replicas * grid.shards, [&](World& world) {
          const shard::Options options{.mesh = world.mesh({grid.replicas, grid.shards}, {"replica", "shard"}),
                                       .layout = layout,
                                       .mixed_precision = {.reduce_dtype = reduce}};
          body(world, options, grid);
        }));
      }
}

std::string kinds(const OrderLog& log) {
  std::string text;
  for (const std::string& line : log.lines()) {
    if (line.find("reduce_scatter") != std::string::npos) text += 'S';
    if (line.find("all_reduce") != std::string::npos) text += 'R';
  }
  return text;
}

}  // namespace

TEST_CASE("sums over shards wait for the replicas, and all of them are averaged at once") {
  on_grids([](World& world, const shard::Options& options, Grid grid) {
    Scale net, by_hand;
    shard::fully_shard(net, options);
    const Group& shards = options.mesh.group("shard");
    const bool both = grid.replicas > 1 && grid.shards > 1;
    for (const bool frozen : {false, true}) {
      shard::set_requires_all_reduce(net, false);
      for (const int step : {0, 1}) {
        const OrderLog log;
        net(integers(world.rank(), step), step == 0).backward();
        expect(kinds(log) == (both || (grid.replicas == 1 && grid.shards > 1) ? "S" : ""), "posted {}",
               kinds(log));
        if (both) expect(!net.weight.grad().defined(), "nothing is averaged yet");
      }
      shard::set_requires_all_reduce(net, true);
      if (frozen) nn::Parameter(net.rarely.object()).set_requires_grad(false);
      const OrderLog log;
      net(integers(world.rank(), 2), false).backward();
      if (both) expect(kinds(log) == "SR", "posted {}", kinds(log));
      Gradients whole = whole_gradients(net, shards);
      const Gradients expected = average_by_hand(by_hand, world.size(), [&](int rank) {
        for (const int step : {0, 1, 2}) by_hand(integers(rank, step), step == 0).backward();
      });
      // Every rank's parts are rounded to the reduce dtype, and with one call a backward the averages too.
      if (options.mixed_precision.reduce_dtype == f32) {
        const std::string found = difference(whole, expected);
        expect(found.empty(), "frozen {}: {}", frozen, found);
      } else {
        for (std::size_t p = 0; p < whole.size(); ++p)
          for (std::size_t i = 0; i < whole[p].size(); ++i)
            expect(std::abs(whole[p][i] - expected[p][i]) <= 2, "{}, not {}", whole[p][i], expected[p][i]);
      }
      nn::Parameter(net.rarely.object()).set_requires_grad(true);
      net.zero_grad();
    }
  });
}

TEST_CASE("what waits for the replicas stays when gradients are cleared, moved or a backward throws") {
  for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
    CHECK_NOTHROW(run_ranks(4, [layout](World& world) {
      Scale net, by_hand;
      shard::fully_shard(net, {.mesh = world.mesh({2, 2}, {"replica", "shard"}), .layout = layout});
      shard::set_requires_all_reduce(net, false);
      net(integers(world.rank(), 0), true).backward();
      net.zero_grad();
      const Tensor loss = net(integers(world.rank(), 1), true);
      const Subscription hook = register_hook(loss, [](const Tensor&) -> Tensor { fail<ValueError>("no"); });
      message_of<ValueError>([&] { loss.backward(); });
      net.to(f64);
      shard::set_requires_all_reduce(net, true);
      net(to(integers(world.rank(), 2), f64), true).backward();
      const Gradients expected = average_by_hand(by_hand, world.size(), [&](int rank) {
        for (const int step : {0, 2}) by_hand(integers(rank, step), true).backward();
      });
      net.to(f32);
      const std::string found =
          difference(whole_gradients(net, world.mesh({2, 2}, {"r", "s"}).group("s")), expected);
      expect(found.empty(), "{}", found);
    }));
}

TEST_CASE("what waits for the replicas goes along with a backward that does not come to its group") {
  for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
    CHECK_NOTHROW(run_ranks(4, [layout](World& world) {
      Two net, by_hand;
      const DeviceMesh mesh = world.mesh({2, 2}, {"replica", "shard"});
      const shard::Options options{.mesh = mesh, .layout = layout};
      shard::fully_shard(net.second, options);
      shard::fully_shard(net, options);
      shard::set_requires_all_reduce(net, false);
      net(integers(world.rank(), 0), true).backward();
      shard::set_requires_all_reduce(net, true);
      net(integers(world.rank(), 1), false).backward();
      const Gradients expected = average_by_hand(by_hand, world.size(), [&](int rank) {
        by_hand(integers(rank, 0), true).backward();
        by_hand(integers(rank, 1), false).backward();
      });
      const std::string found = difference(whole_gradients(net, mesh.group("shard")), expected);
      expect(found.empty(), "{}", found);
    }));
}

TEST_CASE("gradients are divided by the factor that is given, the average to the bit for that of the ranks") {
  on_grids([](World& world, const shard::Options& options, Grid grid) {
    const double ranks = grid.replicas * grid.shards;
    const Group& shards = options.mesh.group("shard");
    const DType dtype = *options.mixed_precision.reduce_dtype;
    const auto gradient = [&](std::optional<double> factor, bool unsynced) {
      Scale net;
      shard::fully_shard(net, options);
      shard::set_gradient_divide_factor(net, 17);
      shard::set_gradient_divide_factor(net, factor);
      const auto x = [&](int step) {
        manual_seed(static_cast<std::uint64_t>(world.rank() + 50 * step));
        return randn({7});
      };
      if (unsynced) {
        const auto guard = shard::no_sync(net);
        net(x(0), true).backward();
      }
      net(x(1), world.rank() == 0).backward();
      return whole_gradients(net, shards);
    };
    for (const bool unsynced : {false, true}) {
      const std::string found = difference(gradient(ranks, unsynced), gradient({}, unsynced));
      expect(found.empty(), "as an average: {}", found);
      const Gradients sums = gradient(1, unsynced);
      for (const double factor : {0.5, 4.0, 1024.0}) {  // exact in any order of division and rounding
        Gradients expected = sums;
        for (std::vector<float>& g : expected)
          for (float& v : g) v = static_cast<float>(v / factor);
        const std::string differs = difference(gradient(factor, unsynced), expected);
        expect(differs.empty(), "by {}: {}", factor, differs);
      }
      if (ranks == 1 || unsynced || dtype != f32) continue;
      Scale by_hand;
      const Gradients expected = average_by_hand(by_hand, world.size(), [&](int rank) {
        manual_seed(static_cast<std::uint64_t>(rank + 50));
        by_hand(randn({7}), rank == 0).backward();
      });
      for (std::size_t p = 0; p < sums.size(); ++p)
        for (std::size_t i = 0; i < sums[p].size(); ++i)
          expect(std::abs(sums[p][i] - float(ranks) * expected[p][i]) < 1e-5, "a sum of {}", sums[p][i]);
    }
  });
}

TEST_CASE("a factor is one module's own, and stays when it is cast or cloned") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Twins twins({.layout = layout});
    shard::set_gradient_divide_factor(twins.net, 2.0 * world.size());
    shard::set_gradient_divide_factor(twins.net.blocks[1], 4.0 * world.size());
    twins.net.to(f64);
    twins.net.to(f32);
    Net copy = twins.net.clone();
    Gradients expected = plain(twins.by_hand, world, 0);
    const std::vector<nn::NamedParameter> names = twins.by_hand.named_parameters();
    for (std::size_t p = 0; p < names.size(); ++p)
      for (float& v : expected[p])
        v /= names[p].name.starts_with("blocks.1.") ? 4 : names[p].name.starts_with("blocks.") ? 1 : 2;
    for (Net* net : {&twins.net, &copy}) {
      loss_at(*net, world.rank(), 0).backward();
      expect_gradients(*net, world, expected, "divided");
    }
  });
}

TEST_CASE("a factor is a number above 0, of a module that is sharded") {
  nn::Linear plain(3, 3), sharded(3, 3);
  shard::fully_shard(sharded);
  for (const double factor :
       {0.0, -1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
    CHECK_THROWS_AS(shard::set_gradient_divide_factor(sharded, factor), ValueError);
  CHECK_THROWS_AS(shard::set_gradient_divide_factor(plain, 2), StateError);
}

TEST_CASE("averages that stay in the reduce dtype are those that are cast from it") {
  on_grids([](World& world, const shard::Options& options, Grid) {
    const auto gradients_of = [&](bool keep) {
      shard::Options its = options;
      its.mixed_precision.keep_low_precision_grads = keep;
      Net net;
      shard_blocks_and_rest(net, its);
      nn::Sgd sgd(net.parameters(), {.lr = 0.1});
      std::vector<std::vector<float>> seen;
      for (const int step : {0, 1}) {  // the second adds to the first
        loss_at(net, world.rank(), step).backward();
        for (const nn::Parameter& p : net.parameters()) {
          if (!p.grad().defined()) continue;
          expect(p.grad().dtype() == (keep ? *options.mixed_precision.reduce_dtype : f32), "a gradient is {}",
                 name_of(p.grad().dtype()));
          if (step == 0) seen.push_back(to(p.grad(), f32).to_vector<float>());
        }
      }
      sgd.step();
      return seen;
    };
    expect(gradients_of(true) == gradients_of(false), "the same values");
  });
}

TEST_CASE(
    "a communication hook reduces in place of the engine, in one order on ranks with different graphs") {
  using enum shard::ShardingStrategy;
  for (const int ranks : {1, 2, 3})
    for (const shard::ShardingStrategy strategy : {full_shard, shard_grad_op, zero1, no_shard})
      for (const int way : {0, 1, 2})
        for (const DType reduce : {f32, bf16}) {
          INFO(ranks << " ranks, strategy " << static_cast<int>(strategy) << ", way " << way);
          CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
            const auto run = [&](bool hooked, int& calls) {
              Two net;
              if (way == 2) {
                shard::FullyShardedDataParallel handle(net, {.strategy = strategy,
                                                             .auto_wrap = shard::wrap_classes({"Scale"}),
                                                             .mixed_precision = {.reduce_dtype = reduce},
                                                             .use_orig_params = true});
              } else {
                const shard::Options options{
                    .layout = way == 0 ? shard::GroupLayout::per_parameter : shard::GroupLayout::flat,
                    .strategy = strategy,
                    .mixed_precision = {.reduce_dtype = reduce}};
                for (Scale* s : {&net.first, &net.second}) shard::fully_shard(*s, options);
                shard::fully_shard(net, options);
              }
              if (hooked) {
                shard::register_comm_hook(
                    net, [&](const Tensor& all, const Tensor& mine, const Group& group) {
                      ++calls;
                      expect(all.dtype() == reduce &&
                                 all.numel() == mine.numel() * (strategy == no_shard ? 1 : ranks),
                             "{} elements for {}", all.numel(), mine.numel());
                      if (strategy == no_shard)
                        group.all_reduce(mine, ReduceOp::average());
                      else
                        group.reduce_scatter(mine, all, ReduceOp::average());
                    });
                expect(!message_of<StateError>([&] { shard::register_comm_hook(net, {}); }).empty(), "twice");
              }
              for (const int step : {0, 1, 2}) {
                std::optional<shard::NoSync> guard;
                if (step == 1) guard.emplace(net);
                manual_seed(static_cast<std::uint64_t>(10 * step + world.rank()));
                net(randn({7}), true, world.rank() == step % ranks).backward();
              }
              return whole_gradients(net, world.group());
            };
            int calls = 0;
            const Gradients expected = run(false, calls), found = run(true, calls);
            const std::string differs = difference(found, expected);
            expect(differs.empty(), "{}", differs);
            expect(calls == (ranks == 1 ? 0 : way == 0 ? 8 : 4), "{} calls", calls);
          }));
        }
  CHECK_NOTHROW(run_ranks(4, [](World& world) {
    Scale net;
    shard::fully_shard(net, {.mesh = world.mesh({2, 2}, {"replica", "shard"})});
    const std::string message = message_of<StateError>([&] { shard::register_comm_hook(net, {}); });
    expect(message.find("two calls") != std::string::npos, "{}", message);
  }));
}
