// A group's whole parameters in two precisions, and on another device than its shard.
#include <array>
#include <cmath>
#include <optional>

#include "collectives/observe.h"
#include "shard/fsdp.h"
#include "shard/fully_shard.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// Layers of several groups; the root reads the first one's weight once more.
struct Layers final : nn::Layer<Layers> {
  nn::ModuleList<nn::Linear> layers;
  nn::BatchNorm1d norm{5};
  Layers() {
    manual_seed(4);
    for (int i = 0; i < 3; ++i) layers.emplace_back(5, 5);
    norm.eval();
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (nn::Linear& layer : layers) y = tanh(layer(y));
    return norm(linear(y, layers[0].weight, {}));
  }
  void visit(auto&& on) {
    on("layers", layers);
    on("norm", norm);
  }
};

void shard_layers(Layers& net, const shard::Options& options) {
  for (nn::Linear& layer : net.layers) shard::fully_shard(layer, options);
  shard::fully_shard(net, options);
}

Tensor loss_at(Layers& net, int rank, int step) {
  return mean(square(to(to(net(batch_of(rank, step, 5).x), Device::cpu()), f32)));
}

constexpr std::array strategies = {shard::ShardingStrategy::full_shard,
                                   shard::ShardingStrategy::shard_grad_op, shard::ShardingStrategy::zero1,
                                   shard::ShardingStrategy::no_shard};

/// Runs `body(world, options)` for every layout and strategy.
template <class F>
void on_ranks_and_strategies(F&& body) {
  on_ranks([&](World& world, shard::GroupLayout layout) {
    for (const shard::ShardingStrategy strategy : strategies)
      body(world, shard::Options{.layout = layout, .strategy = strategy});
  });
}

std::string difference_of(const Layers& a, const Layers& b, const Group& group) {
  return difference(whole_gradients(a, group), whole_gradients(b, group));
}

}  // namespace

TEST_CASE("evaluation in full precision is what an unsharded model gives, and training does not notice") {
  on_ranks_and_strategies([](World& world, shard::Options options) {
    options.mixed_precision = {.param_dtype = bf16, .reduce_dtype = f32, .buffer_dtype = bf16};
    Layers net, reference;
    shard_layers(reference, options);
    options.mixed_precision.evaluation = shard::Precision::full;
    shard_layers(net, options);
    nn::Sgd sgd(net.parameters(), {.lr = 0.1}), of_reference(reference.parameters(), {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      for (auto& [model, optimizer] : {std::pair<Layers&, nn::Sgd&>(net, sgd), {reference, of_reference}}) {
        optimizer.zero_grad();
        model.train();
        model.norm.eval();
        loss_at(model, world.rank(), step).backward();
      }
      const std::string found = difference_of(net, reference, world.group());
      expect(found.empty(), "step {}: {}", step, found);
      net.eval();
      Layers by_hand;
      by_hand.load_state_dict(shard::full_state_dict(net));
      by_hand.eval();
      const auto look = [&] {
        const NoGrad guard;
        const Tensor seen = net(batch_of(world.rank(), 9, 5).x),
                     expected = by_hand(batch_of(world.rank(), 9, 5).x);
        expect(seen.dtype() == f32 && seen.to_vector<float>() == expected.to_vector<float>(), "step {}",
               step);
        expect(net.norm.running_mean.tensor().dtype() == f32, "a buffer is not in its own dtype");
      };
      look();
      sgd.step();
      of_reference.step();
      by_hand.load_state_dict(shard::full_state_dict(net));
      look();
    }
  });
}

TEST_CASE("an evaluation in full precision between two passes changes no bit of a gradient") {
  on_ranks_and_strategies([](World& world, shard::Options options) {
    for (const std::optional<DType> reduce : {std::optional<DType>(), std::optional(f32)})
      for (const int apart : {-1, 0, 1, 2}) {  // micro-batches before it; none: no evaluation
        options.mixed_precision = {
            .param_dtype = bf16, .reduce_dtype = reduce, .evaluation = shard::Precision::full};
        Layers reference, net;
        for (Layers* model : {&reference, &net}) {
          shard_layers(*model, options);
          for (int micro = 0; micro < 3; ++micro) {
            model->train();
            model->norm.eval();
            if (model == &net && micro == apart) {
              const NoGrad guard;
              model->eval();
              (*model)(batch_of(world.rank(), 9, 5).x);
              model->train();
              model->norm.eval();
            }
            std::optional<shard::NoSync> keeps;
            if (micro < 2) keeps.emplace(*model);
            loss_at(*model, world.rank(), micro).backward();
          }
        }
        const std::string found = difference_of(net, reference, world.group());
        expect(found.empty(), "evaluated before {}: {}", apart, found);
      }
  });
}

TEST_CASE("passes of both precisions are summed without an average, in the dtype of the first") {
  on_ranks_and_strategies([](World& world, shard::Options options) {
    options.mixed_precision = {.param_dtype = bf16, .evaluation = shard::Precision::full};
    for (const bool training : {true, false}) {  // the first
      Layers net;
      shard_layers(net, options);
      const auto pass = [&](bool trains) {
        net.train(trains);
        net.norm.eval();
        loss_at(net, world.rank(), 0).backward();
      };
      pass(training);
      const Gradients once = whole_gradients(net, world.group());
      net.zero_grad();
      {
        const shard::NoSync scope(net);
        pass(training);
        pass(!training);
      }
      pass(training);
      const Gradients all = whole_gradients(net, world.group());
      for (std::size_t p = 0; p < once.size(); ++p) {
        float largest = 0;
        for (const float value : once[p]) largest = std::max(largest, std::abs(value));
        for (std::size_t i = 0; i < once[p].size(); ++i)
          expect(std::abs(all[p][i] - 3 * once[p][i]) <= 0.05F * largest, "parameter {}: {} for three of {}",
                 p, all[p][i], once[p][i]);
      }
    }
  });
}

TEST_CASE("evaluation in full precision of what computes as it is stored changes nothing") {
  for (const bool named : {false, true})
    on_ranks_and_strategies([named](World& world, shard::Options options) {
      if (named) options.mixed_precision.param_dtype = f32;
      Layers reference, net;
      shard_layers(reference, options);
      options.mixed_precision.evaluation = shard::Precision::full;
      shard_layers(net, options);
      nn::Sgd sgd(net.parameters(), {.lr = 0.1}), of_reference(reference.parameters(), {.lr = 0.1});
      for (int step = 0; step < 3; ++step)
        for (const bool training : {true, false}) {
          float losses[2];
          for (auto& [model, optimizer, loss] : {std::tuple<Layers&, nn::Sgd&, float&>(net, sgd, losses[0]),
                                                 {reference, of_reference, losses[1]}}) {
            optimizer.zero_grad();
            model.train(training);
            model.norm.eval();
            const Tensor value = loss_at(model, world.rank(), step);
            loss = static_cast<float>(value.item());
            value.backward();
            optimizer.step();
          }
          expect(losses[0] == losses[1], "step {}: {} for {}", step, losses[0], losses[1]);
        }
      const nn::StateDict found = shard::full_state_dict(net), expected = shard::full_state_dict(reference);
      for (std::size_t i = 0; i < found.size(); ++i)
        expect(
            to(found[i].second, f64).to_vector<double>() == to(expected[i].second, f64).to_vector<double>(),
            "'{}'", found[i].first);
    });
}

TEST_CASE("buffers that compute in another dtype keep their values, and what forwards write in them") {
  on_ranks_and_strategies([](World& world, shard::Options options) {
    options.mixed_precision = {
        .param_dtype = bf16, .buffer_dtype = bf16, .evaluation = shard::Precision::full};
    Layers net;
    fill_(net.norm.running_mean.tensor(), 1.001);
    shard_layers(net, options);
    const auto mean_of = [](const nn::StateDict& state) {
      for (const auto& [name, t] : state)
        if (name == "norm.running_mean") return t.to_vector<float>();
      return std::vector<float>{};
    };
    const auto forward = [&](bool training, bool norm_training) {
      const NoGrad guard;
      net.train(training);
      net.norm.train(norm_training);
      loss_at(net, world.rank(), 0);
    };
    const auto expect_mean = [&](const std::vector<float>& values, const char* when) {
      expect(mean_of(shard::full_state_dict(net)) == values, "{}: the whole state", when);
      expect(mean_of(net.state_dict()) == values, "{}: the state", when);
    };
    const std::vector<float> values = full({5}, 1.001).to_vector<float>();
    for (const bool training : {true, false, true, false}) {
      forward(training, false);
      expect(net.norm.running_mean.tensor().dtype() == (training ? bf16 : f32), "the dtype that computes");
      expect_mean(values, training ? "training" : "evaluation");
    }
    expect(net.norm.running_mean.tensor().to_vector<float>() == values, "evaluation reads them");
    forward(true, true);
    const std::vector<float> written = to(net.norm.running_mean.tensor(), f32).to_vector<float>();
    expect(written != values, "the statistics were updated");
    expect_mean(written, "after an update");
    forward(false, false);
    expect(net.norm.running_mean.tensor().to_vector<float>() == written, "evaluation reads the update");
    net.to(f32);
    forward(true, false);
    expect(net.norm.running_mean.tensor().dtype() == bf16, "cast anew after the module was");
    expect_mean(written, "after a cast");
  });
}

TEST_CASE("what is gathered follows the outermost module's mode, alike on ranks that use different modules") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Layers net;
    shard_layers(net, {.layout = layout,
                       .mixed_precision = {.param_dtype = bf16, .evaluation = shard::Precision::full}});
    const auto gathers_of = [&](bool training) {
      net.train(training);
      net.norm.eval();
      net.layers[1].train(!training);  // the outermost one counts
      const OrderLog log;
      sum(square(to(net(batch_of(world.rank(), 0, 5).x), f32))).backward();
      std::pair<int, int> count;
      for (const std::string& line : log.lines()) {
        count.first += line.find("all_gather(bf16") != std::string::npos;
        count.second += line.find("all_gather(f32") != std::string::npos;
      }
      return count;
    };
    for (int times = 0; times < 2; ++times) {
      const auto [reduced, none] = gathers_of(true);
      const auto [neither, full] = gathers_of(false);
      expect(reduced > 0 && none == 0 && neither == 0 && full == reduced, "{} {} {} {}", reduced, none,
             neither, full);
    }
  });
}

TEST_CASE("gradients of both precisions come to one average") {
  on_ranks_and_strategies([](World& world, shard::Options options) {
    Layers by_hand, net;
    options.mixed_precision = {
        .param_dtype = bf16, .reduce_dtype = f32, .evaluation = shard::Precision::full};
    shard_layers(net, options);
    const auto in_both = [](Layers& reduced, Layers& full, int rank) {
      full.eval();
      const Tensor evaluated = loss_at(full, rank, 0);
      reduced.train();
      reduced.norm.eval();
      return std::pair{evaluated, loss_at(reduced, rank, 1)};
    };
    for (int times = 0; times < 2; ++times) {
      net.zero_grad();
      const auto [evaluated, trained] = in_both(net, net, world.rank());
      add(evaluated, trained).backward();
      std::vector<Gradients> of_ranks;
      for (int rank = 0; rank < world.size(); ++rank) {
        Layers reduced = by_hand.clone(), full = by_hand.clone();
        reduced.to(bf16);
        full.eval();
        loss_at(full, rank, 0).backward();
        const auto x = to(batch_of(rank, 1, 5).x, bf16);
        mean(square(to(reduced(x), f32))).backward();
        of_ranks.push_back(plus(gradients(reduced), gradients(full)));
      }
      expect_gradients(net, world, average(of_ranks), "of both");
    }
  });
}

TEST_CASE("a shard on one device computes on another, to the same bits") {
  const Device home = Device::cpu(0), away = Device::cpu(1);
  const auto expect_same = [&](World& world, const shard::Options& options) {
    Layers net, reference;
    shard_layers(reference, options);
    shard::Options split = options;
    split.compute_device = away;
    shard_layers(net, split);
    expect(net.norm.running_mean.tensor().device() == away, "a buffer stayed");
    nn::Adam adam(net.parameters()), of_reference(reference.parameters());
    for (int step = 0; step < 3; ++step) {
      adam.zero_grad();
      of_reference.zero_grad();
      if (step == 1) {
        const auto one = shard::no_sync(net), other = shard::no_sync(reference);
        for (Layers* model : {&net, &reference}) loss_at(*model, world.rank(), 7).backward();
        for (const nn::Parameter& p : net.parameters())
          expect(!p.grad().defined() || p.grad().device() == away, "this rank's own gradient");
      }
      for (Layers* model : {&net, &reference}) loss_at(*model, world.rank(), step).backward();
      for (const nn::Parameter& p : net.parameters()) {
        expect(p.local().device() == home, "the shard is on {}", to_string(p.local().device()));
        expect(!p.grad().defined() || p.grad().device() == home, "the average is not at home");
      }
      const std::string found = difference_of(net, reference, world.group());
      expect(found.empty(), "step {}: {}", step, found);
      adam.step();
      of_reference.step();
      const NoGrad guard;
      expect(net(batch_of(0, 8, 5).x).device() == away, "computed at home");
    }
    const nn::StateDict whole = shard::full_state_dict(net), expected = shard::full_state_dict(reference);
    for (std::size_t i = 0; i < whole.size(); ++i)
      expect(to(to(whole[i].second, home), f64).to_vector<double>() ==
                 to(expected[i].second, f64).to_vector<double>(),
             "'{}'", whole[i].first);
  };
  for (const int ranks : {1, 2, 4})
    for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
      for (const auto& mixed : {shard::MixedPrecisionPolicy{},
                                shard::MixedPrecisionPolicy{.param_dtype = bf16, .reduce_dtype = f32}})
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          for (const shard::ShardingStrategy strategy : strategies)
            expect_same(world, {.layout = layout, .strategy = strategy, .mixed_precision = mixed});
          if (ranks < 4) return;
          expect_same(world, {.layout = layout, .reshard_after_forward = 2, .mixed_precision = mixed});
        }));
}

namespace {

/// A normalisation in f32 before a layer in what its weight computes in, or by hand in bf16.
struct Normed final : nn::Layer<Normed> {
  nn::LayerNorm norm{5};
  nn::Linear layer{5, 5};
  nn::BatchNorm1d batch{5};
  bool by_hand = false;
  Tensor forward(const Tensor& x) {
    const auto weight = [&](const nn::Param& p) {
      return by_hand ? sherd::to(p.tensor(), bf16) : p.tensor();
    };
    const Tensor y =
        sherd::to(norm(sherd::to(x, norm.weight.tensor().dtype())), weight(layer.weight).dtype());
    return batch(
        sherd::to(linear(y, weight(layer.weight), weight(layer.bias)), batch.weight.tensor().dtype()));
  }
  void visit(auto&& on) {
    on("norm", norm);
    on("layer", layer);
    on("batch", batch);
  }
};
Normed seeded() {
  manual_seed(3);
  return {};
}
Tensor normed_loss(Normed& m, int rank) { return sum(square(to(m(batch_of(rank, 0, 5).x), f32))); }

}  // namespace

TEST_CASE("single parameters compute in a dtype of their own") {
  for (const int ranks : {1, 2, 3})
    for (const int way : {0, 1, 2}) {
      INFO(ranks << " ranks, way " << way);
      CHECK_NOTHROW(run_ranks(ranks, [way](World& world) {
        Normed m = seeded(), by_hand = seeded();
        by_hand.by_hand = true;
        const shard::MixedPrecisionPolicy mixed{
            .param_dtype = bf16,
            .reduce_dtype = f32,
            .param_dtype_override =
                [](const std::string& name, const nn::Parameter& p) {
                  expect(p.numel() > 0, "the parameter");
                  return name.starts_with("layer") ? std::optional<DType>() : f32;
                },
            .cast_forward_inputs = false,
            .cast_root_forward_inputs = false};
        if (way == 2)
          shard::FullyShardedDataParallel(m, {.mixed_precision = mixed, .use_orig_params = true});
        else
          shard::fully_shard(
              m, {.layout = way == 0 ? shard::GroupLayout::per_parameter : shard::GroupLayout::flat,
                  .mixed_precision = mixed});
        expect(m.layer.weight.tensor().dtype() == bf16 && m.norm.weight.tensor().dtype() == f32, "as told");
        normed_loss(m, world.rank()).backward();
        const Gradients expected =
            average_by_hand(by_hand, world.size(), [&](int rank) { normed_loss(by_hand, rank).backward(); });
        expect_gradients(m, world, expected, "of two dtypes");
        Normed copy = m.clone();
        expect(copy.layer.weight.tensor().dtype() == bf16 && copy.norm.weight.tensor().dtype() == f32,
               "a clone");
        Normed one = seeded();
        const std::string message =
            message_of<ValueError>([&] { shard::FullyShardedDataParallel(one, {.mixed_precision = mixed}); });
        expect(message.find("use_orig_params") != std::string::npos, "{}", message);
      }));
    }
}

TEST_CASE("wrapping by a rule leaves batch normalisations in the dtype in which they are stored") {
  for (const int ranks : {1, 2})
    CHECK_NOTHROW(run_ranks(ranks, [](World& world) {
      for (const bool wraps : {true, false})
        for (const bool mixed : {true, false}) {
          Normed m = seeded();
          const auto none = [](const nn::Module&) { return false; };
          const shard::MixedPrecisionPolicy low{.param_dtype = bf16, .buffer_dtype = bf16};
          shard::FullyShardedDataParallel(m,
                                          {.auto_wrap = wraps ? shard::AutoWrap(none) : shard::AutoWrap(),
                                           .mixed_precision = mixed ? low : shard::MixedPrecisionPolicy{}});
          normed_loss(m, world.rank()).backward();
          const DType expected = mixed && !wraps ? bf16 : f32;
          expect(m.batch.weight.tensor().dtype() == expected, "wraps {}, mixed {}", wraps, mixed);
          expect(m.batch.running_mean.tensor().dtype() == expected, "buffers: wraps {}, mixed {}", wraps,
                 mixed);
          expect(m.layer.weight.tensor().dtype() == (mixed ? bf16 : f32), "others");
          expect(shard::groups_of(m).size() == (mixed && wraps ? 2u : 1u), "a unit of its own");
        }
    }));
}
