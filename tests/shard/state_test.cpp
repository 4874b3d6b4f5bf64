// What a sharded model is made of and becomes: odd groups, clones, averages, other dtypes, late memory.
#include <array>

#include "nn/init.h"
#include "shard/checkpoint.h"
#include "shard/data_parallel.h"
#include "shard/fsdp.h"
#include "shard/fully_shard.h"
#include "shard/optimizer_state.h"
#include "shard/summon.h"
#include "shard/unit.h"
#include "tests/shard/twins.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// Layers without parameters, and layers whose parameters are in other groups.
struct Hollow final : nn::Layer<Hollow> {
  nn::Linear first{5, 7};
  nn::Relu relu;
  nn::Sequential rest{nn::Linear(7, 3), nn::Gelu()};
  Tensor forward(const Tensor& x) const { return rest(relu(first(x))); }
  void visit(auto&& on) {
    on("first", first);
    on("relu", relu);
    on("rest", rest);
  }
};

Hollow seeded_hollow() {
  manual_seed(1);
  return {};
}

/// A layer in f32 and one that computes and is stored in bf16.
struct TwoDTypes final : nn::Layer<TwoDTypes> {
  nn::Linear wide{5, 7}, narrow{7, 3};
  TwoDTypes() { narrow.to(bf16); }
  Tensor forward(const Tensor& x) const {
    const Tensor y = gelu(wide(x));
    return narrow(sherd::to(y, narrow.weight.tensor().dtype()));
  }
  void visit(auto&& on) {
    on("wide", wide);
    on("narrow", narrow);
  }
};

TwoDTypes seeded_two_dtypes() {
  manual_seed(1);
  return {};
}

Tensor loss_of_dtypes(TwoDTypes& module, int rank, int step) {
  return sum(square(to(module(batch_of(rank, step, 5).x), f32)));
}

/// Values of its own for every parameter, whichever comes first.
void fill(const std::string& name, const Tensor& whole) {
  std::uint64_t seed = 17;
  for (const char c : name) seed = 31 * seed + static_cast<std::uint64_t>(c);
  manual_seed(seed);
  normal_(whole, 0, 0.3);
}

void fill_all(Net& net) {
  const NoGrad guard;
  for (const nn::NamedParameter& p : net.named_parameters()) fill(p.name, p.parameter.local());
}

}  // namespace

TEST_CASE("modules without parameters of their own may be sharded") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Hollow by_hand = seeded_hollow(), hollow = seeded_hollow();
    const shard::Options options{.layout = layout};
    shard::fully_shard(hollow.first, options);
    shard::fully_shard(hollow.relu, options);
    for (std::size_t i : {0, 1}) shard::fully_shard(hollow.rest[i], options);
    shard::fully_shard(hollow.rest, options);
    shard::fully_shard(hollow, options);
    expect(shard::is_sharded(hollow) && shard::is_sharded(hollow.relu), "both were sharded");
    for (int step : {0, 1}) {
      hollow.zero_grad();
      sum(square(hollow(batch_of(world.rank(), step, 5).x))).backward();
      expect_gradients(
          hollow, world,
          average_by_hand(by_hand, world.size(),
                          [&](int rank) { sum(square(by_hand(batch_of(rank, step, 5).x))).backward(); }),
          "with empty groups");
    }
  });
}

TEST_CASE("a module without parameters casts its inputs in the per-parameter layout") {
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    nn::Relu relu;
    shard::fully_shard(relu, {.mixed_precision = {.param_dtype = bf16}});
    expect(relu(ones({2, 2})).dtype() == bf16, "the input was not cast");
    nn::Relu flat;
    shard::fully_shard(flat, {.layout = shard::GroupLayout::flat,
                              .mixed_precision = {.param_dtype = bf16, .cast_root_forward_inputs = false}});
    expect(flat(ones({2, 2})).dtype() == f32, "the input was cast");
  }));
}

TEST_CASE("parameters of several stored dtypes share a per-parameter group") {
  for (const int ranks : {2, 3})
    CHECK_NOTHROW(run_ranks(ranks, [](World& world) {
      TwoDTypes by_hand = seeded_two_dtypes(), module = seeded_two_dtypes();
      shard::fully_shard(module, {});
      nn::Adam adam(module.parameters(), {.lr = 0.01}), reference(by_hand.parameters(), {.lr = 0.01});
      for (int step = 0; step < 3; ++step) {
        adam.zero_grad();
        reference.zero_grad();
        loss_of_dtypes(module, world.rank(), step).backward();
        loss_of_dtypes(by_hand, world.rank(), step).backward();
        for (nn::Parameter& p : by_hand.parameters()) {
          p.set_grad(clone(p.grad()));
          world.group().all_reduce(p.grad(), ReduceOp::average());
        }
        for (const nn::Parameter& p : module.parameters())
          expect(p.grad().dtype() == p.local().dtype(), "a gradient has the stored dtype");
        expect_gradients(module, world, gradients(by_hand), "of two dtypes");
        adam.step();
        reference.step();
      }
      expect_values(module, by_hand, "after steps");
    }));
}

TEST_CASE("a flat group has one dtype") {
  run_ranks(1, [](World&) {
    TwoDTypes module;
    try {
      shard::fully_shard(module, {.layout = shard::GroupLayout::flat});
    } catch (const Error&) {
      return;
    }
    expect(false, "nothing was thrown");
  });
  SUCCEED();
}

TEST_CASE("a clone of a sharded model is sharded, and each trains alone") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Twins twins({.layout = layout}, {.tied = Tied::across_groups, .uneven = true});
    nn::Adam adam(twins.net.parameters()), reference(twins.by_hand.parameters());
    step_both(twins, adam, reference, world, 0);

    Net copy = twins.net.clone(), copy_by_hand = twins.by_hand.clone();
    expect(shard::is_sharded(copy) && shard::is_sharded(copy.blocks[0]), "the clone is sharded");
    expect(shard::groups_of(copy).size() == shard::groups_of(twins.net).size(), "in as many groups");
    expect(copy.parameters().size() == twins.net.parameters().size(), "ties are kept");
    expect_values(copy, copy_by_hand, "a fresh clone");

    nn::Sgd sgd(copy.parameters(), {.lr = 0.1}), sgd_by_hand(copy_by_hand.parameters(), {.lr = 0.1});
    for (int step : {10, 11}) {
      sgd.zero_grad();
      loss_at(copy, world.rank(), step).backward();
      set_gradients(copy_by_hand, plain(copy_by_hand, world, step));
      sgd.step();
      sgd_by_hand.step();
    }
    expect_values(twins.net, twins.by_hand, "the original, after the clone's steps");
    step_both(twins, adam, reference, world, 1);
    expect_values(twins.net, twins.by_hand, "the original, after its own");
    expect_values(copy, copy_by_hand, "the clone, after the original's");
  });
}

TEST_CASE("a clone outlives its original") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    std::optional<Twins> twins(std::in_place, shard::Options{.layout = layout});
    Net copy = twins->net.clone(), by_hand = twins->by_hand.clone();
    twins.reset();
    loss_at(copy, world.rank(), 0).backward();
    expect_gradients(copy, world, plain(by_hand, world, 0), "of a clone alone");
  });
}

namespace {

/// Runs `body(world, shard)` for every layout, strategy and both forms of the handle, on 1 to 4 ranks.
template <class F>
void on_all_ways(F&& body) {
  using enum shard::ShardingStrategy;
  for (const int ranks : {1, 2, 3, 4})
    for (const shard::ShardingStrategy strategy : {full_shard, shard_grad_op, zero1, no_shard})
      for (const int way : {0, 1, 2, 3, 4}) {
        INFO(ranks << " ranks, strategy " << static_cast<int>(strategy) << ", way " << way);
        const auto shard = [=](Net& net) {
          shard::Options options{.strategy = strategy};
          if (way == 1) options.layout = shard::GroupLayout::flat;
          if (way == 2) options.reshard_after_forward = false;
          if (way < 3) return shard_blocks_and_rest(net, options);
          const shard::FullyShardedDataParallel handle(net, {.strategy = strategy,
                                                             .auto_wrap = shard::wrap_classes({"Block"}),
                                                             .use_orig_params = way == 3});
        };
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) { body(world, shard); }));
      }
}

nn::StateDict copies_of(const nn::StateDict& state) {
  nn::StateDict copies;
  for (const auto& [name, tensor] : state) copies.emplace_back(name, clone(tensor));
  return copies;
}

}  // namespace

TEST_CASE("a state dict is the same parts at any moment, and loads at any other") {
  on_all_ways([](World& world, const auto& shard) {
    Net by_hand({.uneven = true}), net({.uneven = true});
    shard(net);
    Tensor loss;
    const std::vector<std::function<void()>> moments = {[] {},
                                                        [&] {
                                                          const NoGrad guard;
                                                          net.eval();
                                                          loss_at(net, world.rank(), 0);
                                                          net.train();
                                                        },
                                                        [&] { loss = loss_at(net, world.rank(), 0); },
                                                        [&] { loss.backward(); },
                                                        [&] {
                                                          shard::set_reshard_after_backward(net, false);
                                                          loss_at(net, world.rank(), 1).backward();
                                                        },
                                                        [&] { shard::reshard(net); }};
    std::vector<nn::StateDict> saved;
    for (const auto& come : moments) {
      come();
      saved.push_back(copies_of(net.state_dict()));
      const std::vector<nn::NamedParameter> listed = net.named_parameters();
      expect(saved.back().size() == listed.size(), "{} entries", saved.back().size());
      for (std::size_t p = 0; p < listed.size(); ++p) {
        const auto& [name, part] = saved.back()[p];
        expect(name == listed[p].name && part.shape() == listed[p].parameter.local().shape(),
               "moment {}: '{}' of shape {}", saved.size() - 1, name, part.shape());
        expect(part.to_vector<float>() == saved[0][p].second.to_vector<float>(), "moment {}: '{}' differs",
               saved.size() - 1, name);
      }
    }
    shard::set_reshard_after_backward(net, true);
    nn::StateDict zeroed = copies_of(saved[0]);
    for (auto& [name, part] : zeroed) zero_(part);
    for (const std::size_t later : {1, 3})
      for (std::size_t moment = 0; moment < moments.size(); ++moment) {
        moments[moment]();
        net.load_state_dict(zeroed);
        net.load_state_dict(saved[(moment + later) % saved.size()]);
        expect_values(net, by_hand, "loaded");
        loss = loss_at(net, world.rank(), 0);
        expect(loss.item() == loss_at(by_hand, world.rank(), 0).item(), "the next forward");
      }
  });
}

TEST_CASE("a change that fails leaves a sharded model as it was") {
  struct Failure final : std::exception {};
  on_all_ways([](World& world, const auto& shard) {
    Net by_hand({.uneven = true}), net({.uneven = true});
    shard(net);
    nn::Adam adam(net.parameters()), reference(by_hand.parameters());
    const auto step = [&](int step) {
      adam.zero_grad();
      loss_at(net, world.rank(), step).backward();
      set_gradients(by_hand, plain(by_hand, world, step));
    };
    step(0);
    const std::vector<float> before = net.parameters()[0].grad().defined()
                                          ? net.parameters()[0].grad().to_vector<float>()
                                          : std::vector<float>{};
    shard::Unit& unit = *shard::unit_of(net);
    // Ranks without a part have fewer gradients to change.
    int failures = 0;
    for (int fail_at = 0; fail_at < 14; ++fail_at) {
      int calls = 0;
      try {
        unit.replace([&](const Tensor& t) {
          if (calls++ == fail_at) throw Failure();
          return clone(t);
        });
      } catch (const Failure&) {
        ++failures;
      }
      const Tensor grad = net.parameters()[0].grad();
      expect((grad.defined() ? grad.to_vector<float>() : std::vector<float>{}) == before, "the gradient");
      expect_values(net, by_hand, "after a change");
    }
    expect(failures > 1 && failures < 14, "{} failures of 14", failures);
    adam.step();
    reference.step();
    expect_values(net, by_hand, "a step with the gradients of before");
    bool thrown = false;
    try {
      net.to(Device::cuda(1000));
    } catch (const Error&) {
      thrown = true;
    }
    expect(thrown, "it moved to a device that is not there");
    for (const int i : {1, 2}) {
      step(i);
      adam.step();
      reference.step();
    }
    expect_values(net, by_hand, "trained on");
  });
}

TEST_CASE("an average of weights is kept shard by shard, and used between its updates") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Twins twins({.layout = layout});
    Net slow = twins.net.clone(), slow_by_hand = twins.by_hand.clone();
    nn::Adam adam(twins.net.parameters(), {.lr = 0.05}), reference(twins.by_hand.parameters(), {.lr = 0.05});
    const auto follow = [](const Net& slow, const Net& fast) {
      const NoGrad guard;
      const std::vector<nn::Parameter> from = fast.parameters(), into = slow.parameters();
      for (std::size_t p = 0; p < into.size(); ++p) {
        mul_(into[p].local(), 0.75);
        add_(into[p].local(), mul(from[p].local(), 0.25));
      }
    };
    for (int step = 0; step < 3; ++step) {
      step_both(twins, adam, reference, world, step);
      follow(slow, twins.net);
      follow(slow_by_hand, twins.by_hand);
      const NoGrad guard;
      expect(loss_at(slow, world.rank(), 50).item() == loss_at(slow_by_hand, world.rank(), 50).item(),
             "the average's loss after step {}", step);
    }
    expect_values(slow, slow_by_hand, "the average");
  });
}

TEST_CASE("a sharded model may change its dtype, and trains on in it") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const DType dtype : {bf16, f64}) {
      Twins twins({.layout = layout});
      nn::Adam before(twins.net.parameters()), reference_before(twins.by_hand.parameters());
      step_both(twins, before, reference_before, world, 0);
      twins.net.zero_grad();
      twins.net.to(dtype);
      twins.by_hand.to(dtype);
      for (const nn::Parameter& p : twins.net.parameters())
        expect(p.local().dtype() == dtype, "the shard has its old dtype");

      nn::Adam adam(twins.net.parameters()), reference(twins.by_hand.parameters());
      const auto loss = [&](Net& net, int step) {
        Batch batch = batch_of(world.rank(), step, net.width);
        batch.x = to(batch.x, dtype);
        return loss_of(net, batch);
      };
      for (int step = 1; step < 4; ++step) {
        adam.zero_grad();
        reference.zero_grad();
        loss(twins.net, step).backward();
        loss(twins.by_hand, step).backward();
        for (nn::Parameter& p : twins.by_hand.parameters()) {
          p.set_grad(clone(p.grad()));
          world.group().all_reduce(p.grad(), ReduceOp::average());
        }
        expect_gradients(twins.net, world, gradients(twins.by_hand), "in the new dtype");
        for (const nn::Parameter& p : twins.net.parameters())
          if (p.grad().defined()) expect(p.grad().dtype() == dtype, "a gradient has its old dtype");
        adam.step();
        reference.step();
      }
      expect_values(twins.net, twins.by_hand, "after steps in the new dtype");
    }
  });
}

TEST_CASE("whole states go into a sharded model and come out again") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Twins twins({.layout = layout});
    Net other({.uneven = true});
    fill_all(other);
    const auto look = [&](Net& net) {
      const NoGrad guard;
      return loss_at(net, world.rank(), 0).item();
    };
    expect(look(twins.net) != look(other), "they begin differently");
    shard::load_full_state_dict(twins.net, other.state_dict());
    expect(look(twins.net) == look(other), "a forward after loading");
    expect_values(twins.net, other, "after loading");

    nn::StateDict bad = other.state_dict();
    bad.back().second = zeros({2, 2});
    bad.front().second = zeros_like(bad.front().second);
    try {
      shard::load_full_state_dict(twins.net, bad);
      expect(false, "nothing was thrown");
    } catch (const ShapeError&) {
    }
    bad.pop_back();
    try {
      shard::load_full_state_dict(twins.net, bad);
      expect(false, "nothing was thrown");
    } catch (const ValueError&) {
    }
    expect_values(twins.net, other, "after loads that failed");
  });
}

TEST_CASE("a model built without memory gets its shard alone, with an unsharded model's values") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const Tied tied : {Tied::no, Tied::across_groups}) {
      Net by_hand({.tied = tied, .uneven = true}), net({.tied = tied, .uneven = true});
      fill_all(by_hand);
      net.to(Device::meta());
      shard_blocks_and_rest(net, {.layout = layout});
      std::vector<std::string> filled, names;
      net.materialize(Device::cpu(), [&](const std::string& name, const Tensor& whole) {
        filled.push_back(name);
        fill(name, whole);
      });
      for (const nn::NamedParameter& p : by_hand.named_parameters()) names.push_back(p.name);
      std::ranges::sort(filled);
      std::ranges::sort(names);
      expect(filled == names, "every parameter once, by its name");
      for (const nn::Parameter& p : net.parameters())
        expect(p.local().device() == Device::cpu(), "a shard without memory");
      expect_values(net, by_hand, "after materialize");

      nn::Adam adam(net.parameters()), reference(by_hand.parameters());
      for (int step : {0, 1}) {
        adam.zero_grad();
        loss_at(net, world.rank(), step).backward();
        set_gradients(by_hand, plain(by_hand, world, step));
        adam.step();
        reference.step();
      }
      expect_values(net, by_hand, "after steps");
    }
  });
}

TEST_CASE("the same draws on every rank fill a sharded model like an unsharded one") {
  on_ranks([](World&, shard::GroupLayout layout) {
    Net by_hand({.uneven = true}), net({.uneven = true});
    const auto draw = [](const std::string&, const Tensor& whole) { normal_(whole, 0, 0.5); };
    net.to(Device::meta());
    shard_blocks_and_rest(net, {.layout = layout});
    manual_seed(3);
    std::vector<std::string> order;
    net.materialize(Device::cpu(), [&](const std::string& name, const Tensor& whole) {
      order.push_back(name);
      draw(name, whole);
    });
    manual_seed(3);
    const NoGrad guard;
    const auto named = by_hand.named_parameters();
    for (const std::string& name : order) {
      const auto found = std::ranges::find(named, name, &nn::NamedParameter::name);
      expect(found != named.end(), "'{}' is no parameter", name);
      draw(name, found->parameter.local());
    }
    expect_values(net, by_hand, "after materialize");
  });
}

namespace {

struct Shifted final : nn::Layer<Shifted> {
  nn::Linear a{4, 4};
  nn::Buffer shift{ones({4})};
  Tensor forward(const Tensor& x) const { return add(a(x), shift); }
  void visit(auto&& on) {
    on("a", a);
    on("shift", shift);
  }
};

}  // namespace

TEST_CASE("a state with something on meta is refused by name, and changes nothing") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    manual_seed(3);
    Shifted net;
    shard::fully_shard(net, {.layout = layout});
    const nn::StateDict before = shard::full_state_dict(net);
    for (std::size_t lost = 0; lost < before.size(); ++lost) {
      nn::StateDict state;
      for (std::size_t i = 0; i < before.size(); ++i) {
        const auto& [name, t] = before[i];
        state.emplace_back(name, i == lost && world.rank() == 0 ? to(t, Device::meta()) : mul(t, 2.0));
      }
      if (world.rank() == 0) {
        const std::string message = message_of<DeviceError>([&] { shard::load_full_state_dict(net, state); });
        expect(message.find(before[lost].first) != std::string::npos, "'{}'", message);
      }
      const nn::StateDict after = shard::full_state_dict(net);
      for (std::size_t i = 0; i < before.size(); ++i)
        expect(after[i].second.to_vector<float>() == before[i].second.to_vector<float>(), "'{}' changed",
               before[i].first);
    }
    net.shift.set(empty({4}, {f32, Device::meta()}));
    const std::string message = message_of<DeviceError>([&] { shard::full_state_dict(net); });
    expect(message.find("shift") != std::string::npos, "'{}'", message);
  });
}

namespace {

/// All values of a sharded model and its optimizer after a step, a checkpoint and a load.
nn::StateDict trained_on(World& world, shard::GroupLayout layout, const std::filesystem::path& folder) {
  manual_seed(4);
  const TensorOptions here{f32, Device::cpu()};
  nn::Sequential net(nn::Linear(4, 4, {.tensor = here}), nn::Linear(4, 3, {.tensor = here}));
  shard::fully_shard(net[0], {.layout = layout});
  shard::fully_shard(net, {.layout = layout});
  nn::Linear replica(4, 2, {.tensor = here});
  shard::DataParallel parallel(replica, world.group());
  nn::AdamW optimizer(net.parameters(), {.lr = 0.1});
  const Tensor x = full({2, 4}, 1 + world.rank(), here);
  {
    const auto joined = parallel.join();
    mean(square(replica(x))).backward();
  }
  mean(square(net(x))).backward();
  shard::clip_grad_norm_(net.parameters(), 1.0);
  optimizer.step();
  shard::save_checkpoint(net, optimizer, folder, world.group());
  {
    const auto whole = shard::summon_full_params(net, {.with_grads = true});
  }
  optimizer.step();
  shard::load_checkpoint(net, optimizer, folder, world.group());
  nn::StateDict all = shard::full_state_dict(net);
  for (const auto& entry : shard::full_optimizer_state(net, optimizer)) all.push_back(entry);
  all.emplace_back("replica", replica.weight.grad());
  return all;
}

}  // namespace

TEST_CASE("sharded steps and checkpoints are the same under any default options") {
  const TempDirectory folder;
  on_ranks([&](World& world, shard::GroupLayout layout) {
    const auto path = folder / fmt::format("{}-{}", world.size(), static_cast<int>(layout));
    const nn::StateDict expected = trained_on(world, layout, path);
    const DefaultOptions scope({.dtype = bf16, .device = Device::meta()});
    const nn::StateDict got = trained_on(world, layout, path);
    expect(got.size() == expected.size(), "{} entries, not {}", got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      const Tensor &a = got[i].second, &b = expected[i].second;
      expect(a.spec() == b.spec(), "'{}' is made otherwise", got[i].first);
      expect(to(a, f64).to_vector<double>() == to(b, f64).to_vector<double>(), "'{}' differs", got[i].first);
    }
  });
}
