// The state of a whole run: models, optimizers, averages, a scaler, counts and generators in one checkpoint.
#include "shard/run_state.h"

#include <filesystem>
#include <set>

#include "collectives/world.h"
#include "nn/batch_sampler.h"
#include "nn/ema.h"
#include "nn/grad_scaler.h"
#include "nn/layers.h"
#include "nn/state_file.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/convert.h"
#include "shard/fully_shard.h"
#include "shard/optimizer_state.h"
#include "tests/catch.h"
#include "tests/shard/message_on_all.h"
#include "tests/shard/places.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;
using Path = std::filesystem::path;

namespace {

/// Rows that no number of ranks divides, a buffer and random numbers.
struct Net final : nn::Layer<Net> {
  nn::Linear in{5, 7}, out{7, 3};
  nn::Buffer mean{zeros({3})};
  Tensor forward(const Tensor& x) const { return sum(square(out(dropout(gelu(in(x)), 0.5)))); }
  void visit(auto&& on) {
    on("in", in);
    on("out", out);
    on("mean", mean);
  }
};

Net sharded(const World& world, Way way, std::uint64_t seed) {
  manual_seed(seed);
  Net net;
  place(net.in, net, world, way);
  return net;
}

/// A model with all that a run has.
struct Run {
  Net net;
  nn::AdamW adamw;
  nn::Sgd sgd;
  nn::Ema ema;
  nn::GradScaler scaler{{.init_scale = 1024, .growth_interval = 2}};
  nn::BatchSampler sampler{100, {.batch = 4, .seed = 5}};
  std::int64_t step = 0;
  double best = 0;
  shard::RunState state;

  Run(const World& world, Way way, std::uint64_t seed = 3)
      : net(sharded(world, way, seed)),
        adamw(net.in.parameters(), {.lr = 0.05}),
        sgd(net.out.parameters(), {.lr = 0.01, .momentum = 0.9}),
        ema(net, 0.75) {
    state.add("model", net).add("adamw", adamw, net).add("sgd", sgd, net).add("ema", ema, net);
    state.add("scaler", scaler).add("sampler", sampler).add("step", step).add("best", best);
  }
  /// The whole loss lies on rank 0, so that an average over a power of two rounds nothing.
  void train(const World& world, int steps) {
    for (; steps > 0; --steps) {
      const std::vector<std::int64_t> samples = sampler.next();
      const Tensor x = mul(rand({4, 5}), static_cast<double>(samples[0]) / 64);
      const double weight = !shard::is_sharded(net) ? 1 : world.rank() == 0 ? world.size() : 0;
      scaler.scale(mul(net(x), weight)).backward();
      scaler.step(adamw);
      scaler.step(sgd);
      scaler.update();
      adamw.zero_grad();
      sgd.zero_grad();
      ema.update(net);
      best = static_cast<double>(++step) / 8;
      const NoGrad guard;
      add_(net.mean.tensor(), 0.5);
    }
  }
  /// Of a plain run: all of it.
  std::vector<std::vector<double>> values() {
    const NoGrad guard;
    std::vector<std::vector<double>> all;
    const auto add = [&](const nn::StateDict& of) {
      for (const auto& [name, tensor] : of) all.push_back(to(tensor, f64).to_vector<double>());
    };
    for (const nn::StateDict& of : {net.state_dict(), adamw.state_dict(), sgd.state_dict(),
                                    nn::StateDict(ema.state_dict()), scaler.state_dict()})
      add(of);
    all.push_back({static_cast<double>(step), best, static_cast<double>(sampler.step())});
    all.push_back(to(rand({3}), f64).to_vector<double>());
    return all;
  }
};

using Values = std::vector<std::vector<double>>;
Values plain_values(int steps) {
  Values values;
  run_ranks(1, [&](World& world) {
    Run run(world, Way::plain);
    run.train(world, steps);
    values = run.values();
  });
  return values;
}
Values values_in(const Path& folder) {
  Values values;
  run_ranks(1, [&](World& world) {
    Run run(world, Way::plain, 9);
    run.train(world, 1);
    shard::load_checkpoint(run.state, folder, world.group());
    values = run.values();
  });
  return values;
}
void save(const Path& folder, int ranks, Way way, int steps, std::uint64_t seed = 3) {
  run_ranks(ranks, [&](World& world) {
    Run run(world, way, seed);
    run.train(world, steps);
    shard::save_checkpoint(run.state, folder, world.group());
  });
}

}  // namespace

TEST_CASE("a run's state goes on to the bit, from any ranks and layout to any others") {
  const Values saved = plain_values(3), next = plain_values(5);
  const TempDirectory folder;
  for (const int from_ranks : {1, 2, 4})
    for (const Way from : ways) {
      INFO("from " << from_ranks << " ranks, way " << static_cast<int>(from));
      const Path first = folder / fmt::format("{} {}", from_ranks, static_cast<int>(from));
      save(first, from_ranks, from, 3);
      CHECK(values_in(first) == saved);
      for (const int ranks : {1, 2, 4})
        for (const Way way : ways) {
          INFO("to " << ranks << " ranks, way " << static_cast<int>(way));
          run_ranks(ranks, [&](World& world) {
            Run run(world, way, 7);
            if (ranks == 2) run.train(world, 1);  // what is there already is replaced
            shard::load_checkpoint(run.state, first, world.group());
            expect(run.step == 3 && run.sampler.step() == 3 && run.best == 0.375, "other numbers");
            run.train(world, 2);
            shard::save_checkpoint(run.state, folder / "next", world.group());
          });
          CHECK(values_in(folder / "next") == next);
        }
    }
}

TEST_CASE("every rank has its own generator back, and ranks beyond those that saved have one of their own") {
  const TempDirectory folder;
  std::vector<std::vector<double>> drawn(2);
  run_ranks(2, [&](World& world) {
    Run run(world, Way::rows);
    manual_seed(10 + static_cast<std::uint64_t>(world.rank()));
    rand({5});
    shard::save_checkpoint(run.state, folder / "run", world.group());
    drawn[static_cast<std::size_t>(world.rank())] = to(rand({4}), f64).to_vector<double>();
  });
  std::vector<std::vector<double>> again(4);
  run_ranks(4, [&](World& world) {
    Run run(world, Way::rows);
    shard::load_checkpoint(run.state, folder / "run", world.group());
    again[static_cast<std::size_t>(world.rank())] = to(rand({4}), f64).to_vector<double>();
  });
  CHECK(again[0] == drawn[0]);
  CHECK(again[1] == drawn[1]);
  CHECK(std::set(again.begin(), again.end()).size() == 4);
}

TEST_CASE("two models with an optimizer each are one checkpoint, and one of them loads alone") {
  const TempDirectory folder;
  for (const int ranks : {1, 2}) {
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      const auto made = [&](std::uint64_t seed) { return sharded(world, Way::rows, seed); };
      Net generator = made(1), critic = made(2), other = made(4), another = made(5), alone = made(6);
      nn::AdamW first(generator.parameters()), second(critic.parameters()), third(other.parameters()),
          fourth(another.parameters());
      for (Net* net : {&generator, &critic}) (*net)(ones({2, 5})).backward();
      first.step();
      second.step();
      shard::RunState run, again, model;
      run.add("model", generator).add("g", first, generator).add("critic", critic).add("c", second, critic);
      again.add("critic", another).add("c", fourth, another).add("model", other).add("g", third, other);
      shard::save_checkpoint(run, folder / "gan", world.group());
      shard::load_checkpoint(again, folder / "gan", world.group());
      shard::load_checkpoint(alone, folder / "gan", world.group());
      const auto same = [](Net& a, Net& b) {
        const nn::StateDict x = shard::full_state_dict(a), y = shard::full_state_dict(b);
        return std::ranges::equal(x, y, [](const auto& l, const auto& r) {
          return l.second.template to_vector<float>() == r.second.template to_vector<float>();
        });
      };
      expect(same(generator, other) && same(critic, another) && same(generator, alone), "other values");
      expect(fourth.state_dict().size() == second.state_dict().size(), "no moments");
    }));
    std::filesystem::remove_all(folder / "gan");
  }
}

TEST_CASE(
    "what a run's checkpoint lacks, has besides, or has of another save is named, and nothing changes") {
  const TempDirectory folder;
  for (const int ranks : {1, 2}) {
    INFO(ranks << " ranks");
    const Path one = folder / fmt::format("one-{}", ranks), other = folder / fmt::format("other-{}", ranks);
    save(one, ranks, Way::rows, 2);
    save(other, ranks, Way::rows, 2, 8);  // the same numbers
    const auto refused = [&](const Path& from, const std::function<void(Run&)>& change) {
      std::string message;
      run_ranks(2, [&](World& world) {
        Run run(world, Way::rows, 7);
        run.train(world, 1);
        change(run);
        const nn::StateDict before = shard::full_state_dict(run.net);
        const std::string said =
            message_on_all(world, [&] { shard::load_checkpoint(run.state, from, world.group()); });
        if (world.rank() == 0) message = said;
        expect(run.step == 1 && run.sampler.step() == 1, "numbers changed");
        for (const auto& [name, tensor] : shard::full_state_dict(run.net))
          expect(tensor.to_vector<float>() == before.at(name).to_vector<float>(), "'{}' changed", name);
        run.train(world, 1);
      });
      return message;
    };
    const auto nothing = [](Run&) {};
    std::int64_t more = 0;
    CHECK_THAT(refused(one, [&](Run& run) { run.state.add("more", more); }),
               ContainsSubstring("the save has no 'more'; leave it out"));
    CHECK_THAT(refused(one, [&](Run& run) { run.state = {}, run.state.add("model", run.net); }),
               ContainsSubstring("the save has 'best', which is no part"));
    CHECK_THAT(refused(one, [&](Run& run) { run.state.add("second", run.net); }),
               ContainsSubstring("second"));
    for (const char* part : {"model", "adamw", "sgd", "ema", "run"}) {
      INFO(part);
      const Path mixed = folder / "mixed";
      std::filesystem::remove_all(mixed);
      std::filesystem::copy(one, mixed);
      for (const auto& entry : std::filesystem::directory_iterator(other))
        if (entry.path().filename().string().starts_with(part))
          std::filesystem::copy(entry.path(), mixed, std::filesystem::copy_options::overwrite_existing);
      CHECK_THAT(refused(mixed, nothing), ContainsSubstring("another save"));
      for (const auto& entry : std::filesystem::directory_iterator(mixed))
        if (entry.path().filename().string().starts_with(part)) std::filesystem::remove(entry.path());
      CHECK_THAT(refused(mixed, nothing),
                 ContainsSubstring(part) || ContainsSubstring("was saved without a RunState"));
    }
  }
}

TEST_CASE("names of a run's parts are of its files, and each is of one part") {
  Net net;
  shard::RunState run;
  std::int64_t step = 0;
  for (const char* name : {"", "run", "index", "a/b", "a.b", "..", "a b", "\n"})
    CHECK_THROWS_WITH(run.add(name, net), ContainsSubstring("give it letters, digits"));
  run.add("model", net);
  CHECK_THROWS_WITH(run.add("model", step), ContainsSubstring("'model' is there already"));
}

TEST_CASE("a part of any ranks' checkpoint becomes the file that one rank saves, a tensor at a time") {
  const TempDirectory folder;
  const Path one = folder / "one";
  save(one, 1, Way::plain, 2);
  for (const int ranks : {1, 2, 3})
    for (const Way way : {Way::rows, Way::flat}) {
      INFO(ranks << " ranks, way " << static_cast<int>(way));
      const Path from = folder / "from";
      save(from, ranks, way, 2);
      for (const char* part : {"model", "adamw", "ema"}) {
        INFO(part);
        const Path merged = folder / "merged.safetensors";
        MemoryLedger& ledger = Context::current().memory();
        ledger.reset_peak(DeviceType::cpu);
        const std::int64_t before = ledger.held(DeviceType::cpu).total();
        shard::merge_checkpoint(from, merged, {.part = part});
        CHECK(ledger.peak(DeviceType::cpu) == before);  // bytes go from file to file
        if (ranks == 3) continue;                       // whose average rounds
        const nn::StateDict expected = nn::load_state(one / (std::string(part) + ".safetensors")),
                            got = nn::load_state(merged);
        REQUIRE(got.size() == expected.size());
        for (const auto& [name, tensor] : expected) {
          INFO(name);
          CHECK(got.at(name).shape() == tensor.shape());
          CHECK(got.at(name).dtype() == tensor.dtype());
          CHECK(to(got.at(name), f64).to_vector<double>() == to(tensor, f64).to_vector<double>());
        }
      }
      CHECK_THROWS_WITH(shard::merge_checkpoint(from, folder / "x", {.part = "nothing"}),
                        ContainsSubstring("nothing"));
      CHECK_FALSE(std::filesystem::exists(folder / "x"));
      std::filesystem::remove_all(from);
    }
}

TEST_CASE("parts may be added in any order, and an optimizer's file is held against its own model's") {
  const TempDirectory folder;
  CHECK_NOTHROW(run_ranks(1, [&](World& world) {
    Net critic, net;
    nn::AdamW optimizer(net.parameters());
    net(ones({2, 5})).backward();
    optimizer.step();
    for (const std::uint64_t seed : {1, 2}) {
      const Path to = folder / std::to_string(seed);
      shard::RunState run;
      run.add("optimizer", optimizer, net).add("critic", critic).add("model", net);
      shard::save_checkpoint(run, to, world.group());
      shard::load_checkpoint(net, optimizer, to, world.group());
      net(ones({2, 5})).backward();
      optimizer.step();
    }
    std::filesystem::copy(folder / "1/optimizer.safetensors", folder / "2/optimizer.safetensors",
                          std::filesystem::copy_options::overwrite_existing);
    const std::string message =
        message_on_all(world, [&] { shard::load_checkpoint(net, optimizer, folder / "2", world.group()); });
    expect(message.find("another save") != message.npos, "'{}'", message);
  }));
}

TEST_CASE("masters that begin anew are of the weights that are loaded") {
  const TempDirectory folder;
  CHECK_NOTHROW(run_ranks(1, [&](World& world) {
    nn::Linear net(4, 1);
    net.to(bf16);
    nn::AdamW optimizer(net.parameters(), {.lr = 0.5, .masters = nn::Masters::in_f32});
    shard::save_checkpoint(net, optimizer, folder / "start", world.group());
    const auto stepped = [&] {
      sum(net(ones({2, 4}, {bf16}))).backward();
      optimizer.step();
      optimizer.zero_grad();
      return to(net.weight.tensor().detach(), f32).to_vector<float>();
    };
    const std::vector<float> first = stepped();
    for (int i = 0; i < 5; ++i) stepped();
    shard::load_checkpoint(net, optimizer, folder / "start", world.group());
    expect(stepped() == first, "another first step");
  }));
}

TEST_CASE("averages of buffers in another dtype and of values that lie otherwise are saved and loaded") {
  const TempDirectory folder;
  for (const int ranks : {1, 2})
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      nn::Sequential net{nn::Linear(6, 7), nn::BatchNorm1d(7)};
      if (ranks > 1)
        shard::fully_shard(net, {.mesh = world.mesh(), .mixed_precision = {.buffer_dtype = bf16}});
      else
        net.parameters()[0].set_data(transpose(randn({6, 7}), 0, 1));
      nn::Ema ema(net, 0.5);
      shard::RunState run;
      run.add("ema", ema, net).add("model", net);
      shard::save_checkpoint(run, folder / "run", world.group());
      std::vector<std::vector<float>> before;
      for (const auto& [name, average] : ema.state_dict()) {
        before.push_back(to(average, f32).to_vector<float>());
        const NoGrad guard;
        mul_(average, 2);
      }
      shard::load_checkpoint(run, folder / "run", world.group());
      for (std::size_t i = 0; i < before.size(); ++i)
        expect(to(ema.state_dict()[i].second, f32).to_vector<float>() == before[i], "average {}", i);
    }));
}

namespace {

/// Refuses a step on one rank.
struct Stubborn {
  bool refuses = false;
  std::int64_t now = 0;
  std::int64_t step() const { return now; }
  void set_step(std::int64_t step) {
    check<ValueError>(!refuses, "stubborn: no step {}", step);
    now = step;
  }
};

}  // namespace

TEST_CASE("a counter that refuses its number, on one rank, changes nothing on any") {
  const TempDirectory folder;
  for (const int ranks : {1, 2})
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      Run run(world, Way::rows);
      Stubborn last;
      run.state.add("last", last);
      shard::save_checkpoint(run.state, folder / "run", world.group());
      run.train(world, 2);
      last.now = 9;
      last.refuses = world.rank() + 1 == ranks;
      const nn::StateDict before = shard::full_state_dict(run.net);
      const RandomKey random = Context::current().generator().state();
      const std::string message =
          message_on_all(world, [&] { shard::load_checkpoint(run.state, folder / "run", world.group()); });
      expect(message.find("no step 0") != message.npos, "'{}'", message);  // and is not asked to go back
      expect(run.step == 2 && run.sampler.step() == 2 && run.best == 0.25 && last.now == 9,
             "numbers changed");
      expect(Context::current().generator().state() == random, "the generator changed");
      for (const auto& [name, tensor] : shard::full_state_dict(run.net))
        expect(tensor.to_vector<float>() == before.at(name).to_vector<float>(), "'{}' changed", name);
      last.refuses = false;
      shard::load_checkpoint(run.state, folder / "run", world.group());
      expect(run.step == 0 && last.now == 0, "not loaded");
    }));
}

TEST_CASE("ranks with other parts than the first are told so, and the group goes on") {
  const TempDirectory folder;
  CHECK_NOTHROW(run_ranks(2, [&](World& world) {
    Run run(world, Way::rows);
    std::int64_t more = 1;
    shard::RunState other;
    other.add("model", run.net).add(world.rank() == 0 ? "one" : "two", more);
    const std::string message =
        message_on_all(world, [&] { shard::save_checkpoint(other, folder / "run", world.group()); });
    expect(message.find("rank 1 has other parts than rank 0") != message.npos, "'{}'", message);
    shard::save_checkpoint(run.state, folder / "run", world.group());
    shard::load_checkpoint(run.state, folder / "run", world.group());
  }));
}

TEST_CASE(
    "a run without a scale loads where one is off, an optimizer of no parameter of its model is refused") {
  const TempDirectory folder;
  CHECK_NOTHROW(run_ranks(1, [&](World& world) {
    Net net, other;
    nn::GradScaler on, off({.scaling = nn::Scaling::off});
    shard::RunState with, without;
    with.add("model", net).add("scaler", on);
    without.add("model", net).add("scaler", off);
    shard::save_checkpoint(with, folder / "on", world.group());
    shard::save_checkpoint(without, folder / "off", world.group());
    shard::load_checkpoint(without, folder / "on", world.group());
    const std::string message =
        message_on_all(world, [&] { shard::load_checkpoint(with, folder / "off", world.group()); });
    expect(message.find("saved while scaling was off") != message.npos, "'{}'", message);
    nn::AdamW optimizer(other.parameters());
    other(ones({2, 5})).backward();
    optimizer.step();
    shard::RunState wrong;
    wrong.add("optimizer", optimizer, net);
    const std::string refused =
        message_on_all(world, [&] { shard::save_checkpoint(wrong, folder / "wrong", world.group()); });
    expect(refused.find("has no parameter of the model") != refused.npos, "'{}'", refused);
    shard::save_checkpoint(net, folder / "plain", world.group());
    const std::string plain =
        message_on_all(world, [&] { shard::load_checkpoint(with, folder / "plain", world.group()); });
    expect(plain.find("saved without a RunState") != plain.npos, "'{}'", plain);
    shard::RunState moved = std::move(with);
    expect(message_on_all(world, [&] { with.add("x", net); }).find("moved from") != std::string::npos,
           "moved");
  }));
}
