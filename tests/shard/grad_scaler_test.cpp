// GradScaler on ranks that are threads; parity_processes runs the same on processes.
#include <sherd.h>

#include "tests/catch.h"
#include "tests/ranks.h"
#include "tests/shard/scaler_runs.h"

using namespace sherd;
using namespace sherd::test;

TEST_CASE("GradScaler: ranks agree on every skipped step and scale, in every way of sharding",
          "[threads meet]") {
  for (const int ranks : {1, 2, 3, 4}) run_ranks(ranks, [](World& world) { check_scaled_runs(world); });
  SUCCEED();
}

TEST_CASE("GradScaler: sharded or not, f16 trains to the same bits in a world of one") {
  run_ranks(1, [](World& world) {
    const auto losses = [&](shard::GroupLayout layout) {
      manual_seed(1);
      nn::Linear net(6, 4);
      shard::fully_shard(net, {.mesh = world.mesh(),
                               .layout = layout,
                               .mixed_precision = {.param_dtype = f16, .cast_forward_inputs = true}});
      nn::Sgd optimizer(net.parameters(), {.lr = 0.5});
      nn::GradScaler scaler({.growth_interval = 2});
      std::vector<double> all;
      for (int step = 0; step < 12; ++step) {
        manual_seed(10);
        const Tensor loss = mean(square(to(net(randn({8, 6})), f32)));
        scaler.scale(loss).backward();
        scaler.step(optimizer);
        scaler.update();
        optimizer.zero_grad();
        all.push_back(loss.item());
      }
      return all;
    };
    const std::vector<double> one = losses(shard::GroupLayout::per_parameter);
    expect(one == losses(shard::GroupLayout::flat), "the layouts differ");
    expect(one.back() < one.front(), "the loss went from {} to {}", one.front(), one.back());
  });
  SUCCEED();
}

TEST_CASE("GradScaler: small gradients of f16 that vanish alone are kept by a scale") {
  run_ranks(1, [](World& world) {
    const auto moved = [&](double scale) {
      manual_seed(1);
      nn::Linear net(4, 1);
      shard::fully_shard(
          net, {.mesh = world.mesh(), .mixed_precision = {.param_dtype = f16, .cast_forward_inputs = true}});
      nn::Sgd optimizer(net.parameters(), {.lr = 1e6});
      const std::vector<float> before = net.weight.local().detach().to_vector<float>();
      nn::GradScaler scaler({.init_scale = scale});
      scaler.scale(mul(to(sum(net(ones({1, 4}))), f32), 1e-9)).backward();
      scaler.step(optimizer);
      return net.weight.local().detach().to_vector<float>() != before;
    };
    expect(!moved(1), "a gradient of 1e-9 should vanish in f16");
    expect(moved(0x1p20), "a scaled gradient vanished");
  });
  SUCCEED();
}
