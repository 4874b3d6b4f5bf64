// GradScaler on ranks that are threads; parity_processes runs the same on processes.
#include <sherd.h>

#include <limits>
#include <optional>

#include "tests/catch.h"
#include "tests/message_of.h"
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

namespace {

enum class Dense { averaged, sharded };
enum class Optimizers { one, two };

/// Experts over pairs of ranks beside a dense part over all: one of `bad`'s gradients is infinite in step 1.
void train_experts(World& world, Dense way, Optimizers optimizers, int bad) {
  manual_seed(0);
  nn::Linear dense(4, 4), expert(4, 4);
  const DeviceMesh mesh = world.mesh({2, 2}, {"experts", "shards"});
  shard::fully_shard(expert, {.mesh = mesh["shards"]});
  std::optional<shard::DataParallel> replicas;
  if (way == Dense::averaged)
    replicas.emplace(dense, world.group());
  else
    shard::fully_shard(dense, {.mesh = world.mesh()});
  std::vector<nn::Parameter> all = dense.parameters();
  if (optimizers == Optimizers::one)
    for (const nn::Parameter& p : expert.parameters()) all.push_back(p);
  nn::Sgd first(all, {.lr = 0.1}), second(expert.parameters(), {.lr = 0.1});
  nn::GradScaler scaler(
      {.init_scale = 1024, .ranks = optimizers == Optimizers::two ? world.group() : Group{}});
  for (int step = 0; step < 3; ++step) {
    const Tensor x = ones({2, 4});
    Tensor of_expert = mean(square(expert(x)));
    if (step == 1 && world.rank() == bad) of_expert = mul(of_expert, std::numeric_limits<float>::infinity());
    scaler.scale(add(mean(square(dense(x))), of_expert)).backward();
    std::vector<double> skipped = {scaler.step(first).item()};
    if (optimizers == Optimizers::two) skipped.push_back(scaler.step(second).item());
    scaler.update();
    first.zero_grad();
    second.zero_grad();
    const bool here = step == 1 && (optimizers == Optimizers::one || bad / 2 == world.rank() / 2);
    expect(skipped.back() == (here ? 1 : 0), "step {}: skipped is {}", step, skipped.back());
    if (optimizers == Optimizers::two)
      expect(skipped[0] == 0, "step {} of finite gradients is skipped", step);
    expect(scaler.get_scale() == (step == 0 ? 1024 : 512), "step {}: a scale of {}", step,
           scaler.get_scale());
  }
}

}  // namespace

TEST_CASE("GradScaler: ranks of which some share an expert and all a dense part agree", "[threads meet]") {
  for (const Dense dense : {Dense::averaged, Dense::sharded})
    for (const Optimizers optimizers : {Optimizers::one, Optimizers::two})
      for (const int bad : {0, 3}) {
        INFO("dense " << static_cast<int>(dense) << " optimizers " << static_cast<int>(optimizers) << " bad "
                      << bad);
        CHECK_NOTHROW(run_ranks(4, [&](World& world) { train_experts(world, dense, optimizers, bad); }));
      }
}

TEST_CASE("GradScaler: stages of a pipeline that share no parameter agree over the ranks they are given") {
  run_ranks(4, [](World& world) {
    manual_seed(0);
    nn::Linear stage(4, 4);
    const DeviceMesh mesh = world.mesh({2, 2}, {"stages", "shards"});
    shard::fully_shard(stage, {.mesh = mesh["shards"]});
    nn::Sgd sgd(stage.parameters(), {.lr = 0.1});
    nn::GradScaler scaler({.init_scale = 1024, .ranks = world.group()});
    Tensor loss = mean(square(stage(ones({2, 4}))));
    if (world.rank() == 3) loss = mul(loss, std::numeric_limits<float>::infinity());
    scaler.scale(loss).backward();
    const double skipped = scaler.step(sgd).item();
    expect(skipped == (world.rank() >= 2 ? 1 : 0), "skipped is {}", skipped);
    scaler.update();
    expect(scaler.get_scale() == 512, "a scale of {}", scaler.get_scale());
  });
  SUCCEED();
}

namespace {

/// A part over pairs of four ranks and one over all, each with an optimizer, and their scaler.
struct Parts {
  World& world;
  DeviceMesh mesh = world.mesh({2, 2}, {"pairs", "shards"}), all = world.mesh();
  nn::Linear of_pair{4, 4}, of_all{4, 4};
  std::optional<nn::Sgd> pairs, alls;
  nn::GradScaler scaler;

  Parts(World& ranks, const Group& named)
      : world(ranks), scaler({.init_scale = 4, .growth_interval = 1, .ranks = named}) {
    shard::fully_shard(of_pair, {.mesh = mesh["shards"]});
    shard::fully_shard(of_all, {.mesh = all});
    pairs.emplace(of_pair.parameters(), nn::SgdOptions{.lr = 0.1});
    alls.emplace(of_all.parameters(), nn::SgdOptions{.lr = 0.1});
  }
  void backward() {
    pairs->zero_grad();
    alls->zero_grad();
    const Tensor x = ones({2, 4});
    scaler.scale(add(mean(square(of_pair(x))), mean(square(of_all(x))))).backward();
  }
};

}  // namespace

TEST_CASE("GradScaler: optimizers of unlike ranks are refused until all ranks are named") {
  run_ranks(4, [](World& world) {
    manual_seed(0);
    Parts unnamed(world, {});
    unnamed.backward();
    unnamed.scaler.step(*unnamed.pairs);
    const std::string told = message_of<StateError>([&] { unnamed.scaler.step(*unnamed.alls); });
    const int first = world.rank() / 2 * 2;
    for (const std::string& word :
         {std::string("ranks [0, 1, 2, 3]"), fmt::format("ranks [{}, {}]", first, first + 1),
          std::string(".ranks = world.group()")})
      expect(told.find(word) != std::string::npos, "'{}' is not in: {}", word, told);
    Parts too_few(world, unnamed.mesh["shards"].group());
    too_few.backward();
    too_few.scaler.step(*too_few.pairs);
    const std::string lacks = message_of<ValueError>([&] { too_few.scaler.step(*too_few.alls); });
    expect(lacks.find(fmt::format("rank {} of the world", first == 0 ? 2 : 0)) != std::string::npos, "{}",
           lacks);
  });
  SUCCEED();
}

TEST_CASE("GradScaler: ranks without an optimizer that others have agree over the ranks that are named") {
  run_ranks(4, [](World& world) {
    manual_seed(0);
    Parts parts(world, world.group());
    for (const double scale : {8, 16}) {
      parts.backward();
      parts.scaler.step(*parts.alls);
      if (world.rank() < 2) parts.scaler.step(*parts.pairs);
      parts.scaler.update();
      expect(parts.scaler.get_scale() == scale, "a scale of {}", parts.scaler.get_scale());
    }
  });
  SUCCEED();
}

TEST_CASE("GradScaler: an update that some parts' ranks lost is made good on all before any part steps",
          "[faults]") {
  for (const bool pairs_first : {true, false})
    for (const int updated : {0, 1, 2, 3, 4})  // by one rank; by those of one pair
      CHECK_NOTHROW(run_ranks(4, [&](World& world) {
        manual_seed(0);
        Parts parts(world, world.group());
        const Group meeting = world.group().blocks(world.size());  // which is not renewed
        const auto step = [&] {
          for (const bool pairs : {pairs_first, !pairs_first})
            parts.scaler.step(pairs ? *parts.pairs : *parts.alls);
        };
        parts.backward();
        step();
        // The last call of an update ends on some ranks and not on others where a fault comes to it.
        if (updated < 4 ? world.rank() == updated : world.rank() >= 2) parts.scaler.update(8);
        meeting.barrier();
        world.group().renew();
        parts.mesh.renew();
        parts.all.renew();
        parts.backward();
        const auto before = parts.of_pair.weight.local().detach().to_vector<float>();
        const std::string told = message_of<StateError>(step);
        expect(told.find("cost some ranks an update") != std::string::npos, "{}", told);
        expect(parts.scaler.get_scale() == 8, "a scale of {}", parts.scaler.get_scale());
        expect(parts.of_pair.weight.local().detach().to_vector<float>() == before, "a part stepped");
        for (const nn::Linear* part : {&parts.of_pair, &parts.of_all})
          expect(!part->weight.grad().defined(), "gradients are left");
        parts.backward();
        step();
        parts.scaler.update();
        expect(parts.scaler.get_scale() == 16, "a scale of {}", parts.scaler.get_scale());
      }));
}

TEST_CASE("GradScaler: axes of a mesh and all of its ranks are the same ranks, and fewer may follow") {
  run_ranks(4, [](World& world) {
    manual_seed(0);
    nn::Linear hybrid(4, 4), sharded(4, 4), replica(4, 4);
    const DeviceMesh mesh = world.mesh({2, 2}, {"replicas", "shards"});
    shard::fully_shard(hybrid, {.mesh = mesh});
    shard::fully_shard(sharded, {.mesh = world.mesh()});
    std::optional<shard::DataParallel> replicas(std::in_place, replica, world.group());
    nn::Sgd of_hybrid(hybrid.parameters(), {.lr = 0.1}), of_sharded(sharded.parameters(), {.lr = 0.1}),
        of_replica(replica.parameters(), {.lr = 0.1});
    nn::GradScaler scaler({.init_scale = 4, .growth_interval = 1});
    const Tensor x = ones({2, 4});
    for (const double scale : {8, 16}) {
      scaler.scale(add(add(mean(square(hybrid(x))), mean(square(sharded(x)))), mean(square(replica(x)))))
          .backward();
      for (nn::Sgd* of : {&of_hybrid, &of_sharded, &of_replica}) scaler.step(*of), of->zero_grad();
      scaler.update();
      expect(scaler.get_scale() == scale, "a scale of {}", scaler.get_scale());
    }
    replicas.reset();
    scaler.scale(mean(square(replica(x)))).backward();
    scaler.step(of_replica);
    scaler.update();
    scaler.scale(mean(square(sharded(x)))).backward();
    const std::string told = message_of<StateError>([&] { scaler.step(of_sharded); });
    expect(told.find("ranks [0, 1, 2, 3], those of one that stepped before by this rank alone") != told.npos,
           "{}", told);
  });
  SUCCEED();
}

TEST_CASE("GradScaler: a rank without any optimizer takes part in updates of the ranks that are named",
          "[faults]") {
  run_ranks(2, [](World& world) {
    nn::Linear here(4, 4);
    nn::Sgd sgd(here.parameters(), {.lr = 0.1});
    nn::GradScaler scaler({.init_scale = 4, .growth_interval = 1, .ranks = world.group()});
    const auto step = [&] {
      sgd.zero_grad();
      scaler.scale(world.rank() == 0 ? mean(square(here(ones({2, 4})))) : zeros({}).requires_grad_())
          .backward();
      if (world.rank() == 0) scaler.step(sgd);
      scaler.update();
    };
    const Group meeting = world.group().blocks(world.size());  // which is not renewed
    step();
    if (world.rank() == 1) scaler.update(32);
    meeting.barrier();
    world.group().renew();
    expect(message_of<StateError>(step).find("cost some ranks an update") != std::string::npos, "no error");
    step();
    expect(scaler.get_scale() == 64, "a scale of {}", scaler.get_scale());
  });
  SUCCEED();
}

TEST_CASE("GradScaler: a renewal of a group of one rank alone cost nobody an update") {
  run_ranks(2, [](World& world) {
    const Group alone = world.group().blocks(1);
    for (const bool sharded : {true, false}) {
      nn::Linear net(4, 4);
      std::optional<shard::DataParallel> replicas;
      if (sharded)
        shard::fully_shard(net, {.mesh = world.mesh()});
      else
        replicas.emplace(net, world.group());
      nn::Sgd optimizer(net.parameters(), {.lr = 0.1});
      nn::GradScaler scaler({.init_scale = 4, .growth_interval = 1});
      for (int i = 0; i < 4; ++i) {
        if (i == 2 && world.rank() == 0) alone.renew();
        scaler.scale(mean(square(net(ones({2, 4}))))).backward();
        scaler.step(optimizer);
        scaler.update();
        optimizer.zero_grad();
      }
      expect(scaler.get_scale() == 64, "a scale of {}", scaler.get_scale());
    }
  });
  SUCCEED();
}

TEST_CASE("GradScaler: an optimizer's parameters of a few ranks and of all may be listed in any order") {
  for (const bool alike : {true, false})
    for (const bool pair_first : {true, false})
      CHECK_NOTHROW(run_ranks(4, [&](World& world) {
        const DeviceMesh mesh = world.mesh({2, 2}, {"pairs", "shards"}), all = world.mesh();
        nn::Linear of_pair(4, 4), of_all(4, 4);
        shard::fully_shard(of_pair, {.mesh = mesh["shards"]});
        shard::fully_shard(of_all, {.mesh = all});
        const bool first = pair_first == (alike || world.rank() % 2 == 0);
        std::vector<nn::Parameter> list;
        for (nn::Linear* part : first ? std::array{&of_pair, &of_all} : std::array{&of_all, &of_pair})
          std::ranges::copy(part->parameters(), std::back_inserter(list));
        nn::Sgd optimizer(list, {.lr = 0.1});
        nn::GradScaler scaler({.init_scale = 4, .growth_interval = 1, .ranks = world.group()});
        for (const bool finite : {true, false, true}) {
          optimizer.zero_grad();
          const double by = finite || world.rank() > 0 ? 1 : std::numeric_limits<double>::infinity();
          const Tensor x = ones({2, 4});
          scaler.scale(add(mean(mul(of_pair(x), by)), mean(of_all(x)))).backward();
          const Tensor skipped = scaler.step(optimizer);
          expect((skipped.item() != 0) == !finite, "ranks disagree");
          scaler.update();
        }
        expect(scaler.get_scale() == 8, "a scale of {}", scaler.get_scale());
      }));
}
