// Checkpoints over meshes of two dimensions: each group of ranks along one has parameters of its own, a slice
// of a layer or an expert, beside what all ranks share.
#include <filesystem>
#include <map>

#include "collectives/world.h"
#include "nn/ema.h"
#include "nn/layers.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/checkpoint.h"
#include "shard/data_parallel.h"
#include "shard/fully_shard.h"
#include "shard/optimizer_state.h"
#include "shard/run_state.h"
#include "shard/saved_state.h"
#include "shard/sharded_state.h"
#include "tests/catch.h"
#include "tests/ranks.h"
#include "tests/shard/message_on_all.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;
using Path = std::filesystem::path;

namespace {

struct Counted final : nn::Layer<Counted> {
  nn::Linear linear;
  nn::Buffer seen{zeros({1})};
  Counted(std::int64_t in, std::int64_t out) : linear(in, out) {}
  Tensor forward(const Tensor& x) const { return linear(x); }
  void visit(auto&& on) {
    on("linear", linear);
    on("seen", seen);
  }
};

constexpr std::int64_t hidden = 12;

/// What all share, the rows of a layer of which each group has as many, and an expert under a name that one
/// group has.
struct Net final : nn::Layer<Net> {
  nn::Linear dense{5, 3};
  Counted slice;
  Counted expert{5, 3};
  nn::Buffer steps{zeros({2})};
  std::string expert_name;
  Net(int group, int groups) : slice(5, hidden / groups), expert_name(fmt::format("expert{}", group)) {}
  Tensor forward(const Tensor& x) const {
    return sum(square(dense(x))) + sum(square(slice(x))) + sum(square(expert(x)));
  }
  void visit(auto&& on) {
    on("dense", dense);
    on("slice", slice);
    on(expert_name, expert);
    on("steps", steps);
  }
};

enum class Way { rows, flat, replicated, averaged };
constexpr Way ways[] = {Way::rows, Way::flat, Way::replicated, Way::averaged};

/// How many groups there are, and how many ranks each.
struct Sizes {
  int groups, ranks;
  int world() const { return groups * ranks; }
};

struct Run {
  DeviceMesh mesh;
  int group;
  Net net;
  std::vector<std::unique_ptr<shard::DataParallel>> averages;
  nn::AdamW adamw;
  nn::Sgd sgd;
  nn::Ema ema;
  std::int64_t step = 0;
  shard::RunState state;

  Run(const World& world, Sizes sizes, Way way, std::uint64_t seed = 3)
      : mesh(world.mesh({sizes.groups, sizes.ranks}, {"model", "shards"})),
        group(mesh.coordinate("model")),
        net(made(seed, group, sizes.groups)),
        adamw(placed(world, way), {.lr = 0.05}),
        sgd(net.expert.parameters(), {.lr = 0.05, .momentum = 0.9}),
        ema(net, 0.75) {
    state.add("model", net).add("adamw", adamw, net).add("sgd", sgd, net).add("ema", ema, net);
    state.add("step", step);
  }
  void train(int steps) {
    for (; steps > 0; --steps, ++step) {
      manual_seed(static_cast<std::uint64_t>(10 * step + group));
      net(rand({2, 5})).backward();
      adamw.step();
      sgd.step();
      adamw.zero_grad();
      sgd.zero_grad();
      ema.update(net);
      const NoGrad guard;
      add_(net.slice.seen.tensor(), 1 + group);
      add_(net.expert.seen.tensor(), 10 + group);
      add_(net.steps.tensor(), 1);
    }
  }
  /// Whole, of this rank's group. Collective.
  std::map<std::string, std::vector<double>> values() {
    std::map<std::string, std::vector<double>> all;
    const auto add = [&](const std::string& of, const nn::StateDict& state) {
      for (const auto& [name, tensor] : state) all[of + name] = to(tensor, f64).to_vector<double>();
    };
    add("", shard::full_state_dict(net));
    add("adamw ", shard::full_optimizer_state(net, adamw));
    add("sgd ", shard::full_optimizer_state(net, sgd));
    return all;
  }

 private:
  static Net made(std::uint64_t seed, int group, int groups) {
    manual_seed(seed);
    nn::Linear dense(5, 3);
    manual_seed(seed + 100 * static_cast<std::uint64_t>(1 + group));
    Net net(group, groups);
    net.dense = std::move(dense);
    return net;
  }
  /// Parameters that the first optimizer steps: all but the expert's.
  std::vector<nn::Parameter> placed(const World& world, Way way) {
    shard::Options own{.mesh = mesh["shards"]}, all{.mesh = world.mesh()};
    if (way == Way::flat) own.layout = all.layout = shard::GroupLayout::flat;
    if (way == Way::replicated) own.strategy = shard::ShardingStrategy::no_shard;
    for (Counted* part : {&net.slice, &net.expert})
      if (way == Way::averaged)
        averages.push_back(std::make_unique<shard::DataParallel>(*part, mesh.group("shards")));
      else
        shard::fully_shard(*part, own);
    shard::fully_shard(net.dense, all);
    std::vector<nn::Parameter> all_but_expert = net.dense.parameters();
    for (const nn::Parameter& p : net.slice.parameters()) all_but_expert.push_back(p);
    return all_but_expert;
  }
};

using Values = std::map<std::string, std::vector<double>>;

/// What each group has after two steps, which is saved.
std::vector<Values> save(const Path& folder, Sizes sizes, Way way, int steps = 2, std::uint64_t seed = 3) {
  std::vector<Values> found(static_cast<std::size_t>(sizes.groups));
  run_ranks(sizes.world(), [&](World& world) {
    Run run(world, sizes, way, seed);
    run.train(steps);
    shard::save_checkpoint(run.state, folder, world.group());
    const Values mine = run.values();
    if (run.mesh.coordinate("shards") == 0) found[static_cast<std::size_t>(run.group)] = mine;
  });
  return found;
}

/// Those that a rank has, each under a name of its own.
struct Experts final : nn::Layer<Experts> {
  std::vector<std::pair<std::string, std::shared_ptr<nn::Linear>>> own;
  Tensor forward(const Tensor& x) const { return x; }
  void visit(auto&& on) {
    for (auto& [name, expert] : own) on(name, *expert);
  }
};

/// A part that a group holds beside one that nobody says anything of.
struct Mixed final : nn::Layer<Mixed> {
  nn::Linear held{5, 3}, free{5, 3};
  nn::Buffer seen{zeros({1})};
  Tensor forward(const Tensor& x) const { return held(x); }
  void visit(auto&& on) {
    on("free", free);
    on("held", held);
    on("seen", seen);
  }
};

/// What all share comes first in one group, and last in the other.
struct Unlike final : nn::Layer<Unlike> {
  bool shared_first;
  std::string own_name;
  nn::Linear own{5, 3}, shared{5, 3};
  explicit Unlike(int group) : shared_first(group == 1), own_name(fmt::format("expert{}", group)) {}
  Tensor forward(const Tensor& x) const { return sum(square(shared(x))) + sum(square(own(x))); }
  void visit(auto&& on) {
    if (shared_first) on("shared", shared);
    on(own_name, own);
    if (!shared_first) on("shared", shared);
  }
};

constexpr Sizes all_sizes[] = {{1, 1}, {1, 3}, {2, 1}, {2, 2}, {3, 1}, {4, 1}};

}  // namespace

TEST_CASE("each group of a mesh has its own back, to the bit, at any size of the other dimension") {
  const TempDirectory folder;
  for (const Sizes from : all_sizes)
    for (const Way way : ways) {
      INFO("from " << from.groups << " x " << from.ranks << ", way " << static_cast<int>(way));
      const Path saved = folder / fmt::format("{} {} {}", from.groups, from.ranks, static_cast<int>(way));
      const std::vector<Values> expected = save(saved, from, way);
      for (const int ranks : {1, 2, 3})
        for (const Way to : ways) {
          if (from.groups * ranks > 4) continue;
          INFO("to " << ranks << " ranks each, way " << static_cast<int>(to));
          CHECK_NOTHROW(run_ranks(from.groups * ranks, [&](World& world) {
            Run run(world, {from.groups, ranks}, to, 7);
            if (ranks == 2) run.train(1);  // what is there already is replaced
            shard::load_checkpoint(run.state, saved, world.group());
            expect(run.step == 2, "{} steps", run.step);
            const Values& mine = expected[static_cast<std::size_t>(run.group)];
            for (const auto& [name, numbers] : run.values())
              expect(mine.at(name) == numbers, "'{}' of group {} differs", name, run.group);
            expect(run.values().size() == mine.size(), "not as many values");
          }));
        }
    }
}

TEST_CASE("a mesh goes on from a checkpoint to the bits of one that was not stopped, averages too") {
  const TempDirectory folder;
  for (const Sizes sizes : {Sizes{2, 1}, Sizes{2, 2}})
    for (const Way way : ways) {
      INFO(sizes.ranks << " ranks a group, way " << static_cast<int>(way));
      CHECK_NOTHROW(run_ranks(sizes.world(), [&](World& world) {
        Run run(world, sizes, way), again(world, sizes, way, 7);
        run.train(2);
        shard::save_checkpoint(run.state, folder / "run", world.group());
        shard::load_checkpoint(again.state, folder / "run", world.group());
        run.train(2);
        again.train(2);
        expect(run.values() == again.values(), "other values");
        const nn::StateDict averages = run.ema.state_dict(), others = again.ema.state_dict();
        for (std::size_t i = 0; i < averages.size(); ++i)
          expect(averages[i].second.to_vector<float>() == others[i].second.to_vector<float>(),
                 "another average of '{}'", averages[i].first);
      }));
    }
}

TEST_CASE("a name that every group has of its own is in the files once a group, others once") {
  const TempDirectory folder;
  save(folder / "run", {2, 2}, Way::rows);
  const shard::SavedState saved(folder / "run", "model");
  std::map<std::string, int> groups;
  for (const shard::SavedTensor& t : saved.tensors()) {
    groups[std::string(t.name)]++;
    CHECK(t.saved_by.empty() == (t.groups == 1));
  }
  CHECK(groups == std::map<std::string, int>{{"dense.weight", 1},
                                             {"dense.bias", 1},
                                             {"slice.linear.weight", 2},
                                             {"slice.linear.bias", 2},
                                             {"slice.seen", 2},
                                             {"expert0.linear.weight", 1},
                                             {"expert0.linear.bias", 1},
                                             {"expert0.seen", 1},
                                             {"expert1.linear.weight", 1},
                                             {"expert1.linear.bias", 1},
                                             {"expert1.seen", 1},
                                             {"steps", 1}});
  CHECK(saved.find("slice.linear.weight", 1)->saved_by == "world.shards of the ranks 2, 3");
  CHECK(saved.read(*saved.find("slice.seen", 0), 0, 1).item() == 2);
  CHECK(saved.read(*saved.find("slice.seen", 1), 0, 1).item() == 4);
}

TEST_CASE("states of ranks in memory are each group's own too, an optimizer's by name and by number") {
  for (const Sizes sizes : {Sizes{2, 1}, Sizes{2, 2}})
    for (const Way from : ways)
      for (const Way way : ways)
        CHECK_NOTHROW(run_ranks(sizes.world(), [&](World& world) {
          Run run(world, sizes, from), other(world, sizes, way, 7), third(world, sizes, way, 8);
          run.train(2);
          const Group& all = world.group();
          for (Run* into : {&other, &third})
            shard::load_sharded_state_dict(into->net, shard::sharded_state_dict(run.net), all);
          shard::load_sharded_optimizer_state(other.net, other.adamw,
                                              shard::sharded_optimizer_state(run.net, run.adamw), all);
          shard::load_sharded_optimizer_state(other.net, other.sgd,
                                              shard::sharded_optimizer_state(run.net, run.sgd), all);
          shard::load_sharded_optimizer_state(third.net, third.adamw,
                                              shard::sharded_optimizer_state(run.adamw), all);
          shard::load_sharded_optimizer_state(third.sgd, shard::sharded_optimizer_state(run.sgd), all);
          expect(run.values() == other.values(), "other values");
          expect(run.values() == third.values(), "other values by number");
        }));
}

TEST_CASE("what replicas share and do not train is each group's own too, frozen parameters and buffers") {
  enum class Frozen { none, bias, all };
  const TempDirectory folder;
  for (const Sizes sizes : {Sizes{2, 1}, Sizes{2, 2}, Sizes{1, 3}})
    for (const Frozen frozen : {Frozen::none, Frozen::bias, Frozen::all})
      for (const bool shares_buffers : {true, false}) {
        INFO(sizes.groups << " x " << sizes.ranks << ", frozen " << static_cast<int>(frozen));
        CHECK_NOTHROW(run_ranks(sizes.world(), [&](World& world) {
          const DeviceMesh mesh = world.mesh({sizes.groups, sizes.ranks}, {"model", "replicas"});
          const int group = mesh.coordinate("model");
          const auto made = [&](std::uint64_t seed) {
            manual_seed(seed + static_cast<std::uint64_t>(group));
            auto net = std::make_unique<Net>(group, sizes.groups);
            const NoGrad guard;
            for (Counted* part : {&net->slice, &net->expert}) {
              fill_(part->seen.tensor(), static_cast<double>(seed) + group);
              if (frozen != Frozen::none) part->linear.bias.set_requires_grad(false);
              if (frozen == Frozen::all) part->linear.weight.set_requires_grad(false);
            }
            return net;
          };
          const auto net = made(3), other = made(7), third = made(9);
          const shard::DataParallelOptions options{.broadcast_buffers = shares_buffers
                                                                            ? shard::BroadcastBuffers::yes
                                                                            : shard::BroadcastBuffers::no};
          std::vector<shard::DataParallel> replicas;
          for (Net* one : {net.get(), other.get(), third.get()}) {
            for (Counted* part : {&one->slice, &one->expert})
              replicas.emplace_back(*part, mesh.group("replicas"), options);
            replicas.emplace_back(one->dense, world.group());
          }
          const nn::StateDict wanted = shard::full_state_dict(*net);
          shard::save_checkpoint(*net, folder / "saved", world.group());
          shard::load_checkpoint(*other, folder / "saved", world.group());
          shard::load_sharded_state_dict(*third, shard::sharded_state_dict(*net), world.group());
          for (Net* into : {other.get(), third.get()})
            for (const auto& [name, tensor] : shard::full_state_dict(*into))
              expect(tensor.to_vector<float>() == wanted.at(name).to_vector<float>(), "another '{}'", name);
        }));
      }
}

TEST_CASE("a buffer goes with those parameters of its module that a group holds") {
  const TempDirectory folder;
  for (const Way way : {Way::rows, Way::averaged})
    CHECK_NOTHROW(run_ranks(4, [&](World& world) {
      const DeviceMesh mesh = world.mesh({2, 2}, {"model", "shards"});
      const int group = mesh.coordinate("model");
      Mixed net, other;
      for (Mixed* one : {&net, &other}) fill_(one->seen.tensor(), one == &net ? 1 + group : 7);
      std::vector<shard::DataParallel> averages;
      for (Mixed* one : {&net, &other})
        if (way == Way::rows)
          shard::fully_shard(one->held, {.mesh = mesh["shards"]});
        else
          averages.emplace_back(one->held, mesh.group("shards"));
      shard::save_checkpoint(net, folder / "mixed", world.group());
      shard::load_checkpoint(other, folder / "mixed", world.group());
      expect(other.seen.tensor().item() == 1 + group, "it is {}", other.seen.tensor().item());
    }));
}

TEST_CASE("a state of ranks that one group lacks something of is refused on all ranks, which go on") {
  const Sizes sizes{2, 2};
  for (const Way way : ways)
    CHECK_NOTHROW(run_ranks(sizes.world(), [&](World& world) {
      Run run(world, sizes, way);
      run.train(1);
      const Values before = run.values();
      const auto refused = [&](const shard::ShardedStateDict& whole, const auto& load) {
        for (std::size_t i = 0; i < whole.size(); ++i)
          for (const bool lacks : {true, false}) {  // a tensor, or elements of it
            shard::ShardedStateDict state = whole;
            const std::string name = state[i].name;
            if (lacks && name.starts_with("group.") && !name.ends_with(".lr")) continue;  // it stays then
            if (run.group == 1 && lacks) state.erase(state.begin() + static_cast<std::ptrdiff_t>(i));
            if (run.group == 1 && !lacks) state[i].shape = {17};
            const std::string message = message_on_all(world, [&] { load(state); });
            expect(!message.empty(), "'{}' is not missed", name);
          }
      };
      refused(shard::sharded_state_dict(run.net),
              [&](const auto& state) { shard::load_sharded_state_dict(run.net, state, world.group()); });
      for (nn::Optimizer* optimizer :
           {static_cast<nn::Optimizer*>(&run.adamw), static_cast<nn::Optimizer*>(&run.sgd)})
        for (nn::Module* model : {static_cast<nn::Module*>(&run.net), static_cast<nn::Module*>(nullptr)})
          refused(model != nullptr ? shard::sharded_optimizer_state(*model, *optimizer)
                                   : shard::sharded_optimizer_state(*optimizer),
                  [&](const auto& state) {
                    if (model != nullptr)
                      shard::load_sharded_optimizer_state(*model, *optimizer, state, world.group());
                    else
                      shard::load_sharded_optimizer_state(*optimizer, state, world.group());
                  });
      expect(run.values() == before, "something changed");
      run.train(1);
    }));
}

TEST_CASE("a checkpoint that does not fit a mesh names the groups, on every rank, and nothing changes") {
  const TempDirectory folder;
  save(folder / "two", {2, 2}, Way::rows);
  save(folder / "one", {1, 2}, Way::rows);
  const auto refused = [&](const Path& from, Sizes sizes, const std::function<void(Run&)>& change) {
    std::string message;
    run_ranks(sizes.world(), [&](World& world) {
      Run run(world, sizes, Way::rows, 7);
      run.train(1);
      change(run);
      const Values before = run.values();
      const std::string said =
          message_on_all(world, [&] { shard::load_checkpoint(run.state, from, world.group()); });
      if (world.rank() == 0) message = said;
      expect(run.values() == before && run.step == 1, "something changed");
      run.train(1);
    });
    return message;
  };
  const auto nothing = [](Run&) {};
  for (const Sizes sizes : {Sizes{1, 2}, Sizes{4, 1}, Sizes{3, 1}}) {
    const std::string message = refused(folder / "two", sizes, nothing);
    INFO(message);
    CHECK_THAT(message,
               ContainsSubstring("was saved as 2 tensors, one of each group of ranks (the first of "
                                 "world.shards of the ranks 0, 1)") &&
                   ContainsSubstring(sizes.groups == 1 ? "here there is one of that name"
                                                       : fmt::format("here there are {} of", sizes.groups)) &&
                   ContainsSubstring("index.json") && ContainsSubstring("as many groups"));
  }
  const std::string whole = refused(folder / "one", {2, 2}, nothing);
  INFO(whole);
  CHECK_THAT(whole,
             ContainsSubstring("'slice.linear.weight' has shape (6, 5) in the module and (12, 5)") &&
                 ContainsSubstring("here it is on world.shards of the ranks 0, 1, in the save on all ranks"));
}

TEST_CASE("experts by name go to as many groups as there are now, and one that nobody has is named") {
  const auto made = [](const DeviceMesh& mesh, std::uint64_t seed, int experts) {
    Experts net;
    for (int e = 0; e < experts; ++e) {
      if (e % mesh.size("experts") != mesh.coordinate("experts")) continue;
      manual_seed(seed + static_cast<std::uint64_t>(e));
      net.own.emplace_back(fmt::format("{}", e), std::make_shared<nn::Linear>(5, 3));
      shard::fully_shard(*net.own.back().second, {.mesh = mesh["shards"]});
    }
    return net;
  };
  const TempDirectory folder;
  const auto saved = [&](Sizes sizes) {
    CHECK_NOTHROW(run_ranks(sizes.world(), [&](World& world) {
      Experts net = made(world.mesh({sizes.groups, sizes.ranks}, {"experts", "shards"}), 3, 4);
      shard::save_checkpoint(net, folder / "experts", world.group());
    }));
  };
  for (const Sizes from : {Sizes{1, 1}, Sizes{2, 1}, Sizes{2, 2}, Sizes{4, 1}}) {
    saved(from);
    for (const Sizes sizes : {Sizes{1, 1}, Sizes{1, 3}, Sizes{2, 1}, Sizes{2, 2}, Sizes{4, 1}}) {
      INFO("from " << from.groups << " x " << from.ranks << " to " << sizes.groups << " x " << sizes.ranks);
      CHECK_NOTHROW(run_ranks(sizes.world(), [&](World& world) {
        const DeviceMesh mesh = world.mesh({sizes.groups, sizes.ranks}, {"experts", "shards"});
        Experts net = made(mesh, 9, 4), expected = made(mesh, 3, 4), fewer = made(mesh, 9, 3);
        shard::load_checkpoint(net, folder / "experts", world.group());
        const nn::StateDict wanted = shard::full_state_dict(expected);
        for (const auto& [name, tensor] : shard::full_state_dict(net))
          expect(tensor.to_vector<float>() == wanted.at(name).to_vector<float>(), "another '{}'", name);
        const std::string message =
            message_on_all(world, [&] { shard::load_checkpoint(fewer, folder / "experts", world.group()); });
        expect(message.find("2 of the state's entries belong to no parameter or buffer here, among them "
                            "'3.bias'") != std::string::npos,
               "{}", message);
      }));
    }
  }
}

TEST_CASE("files in which the groups of a name do not make up what they say are refused by group") {
  const TempDirectory folder;
  save(folder / "run", {2, 1}, Way::rows);
  const auto with_note = [&](const std::string& note) {
    const Path file = folder / "one" / "model.safetensors";
    std::filesystem::remove_all(folder / "one");
    std::filesystem::create_directory(folder / "one");
    nn::save_state(file, {{"x", ones({2})}}, {{"sherd.group.x", note}});
    return message_of<ValueError>([&] { shard::SavedState(folder / "one", "model"); });
  };
  CHECK_THAT(with_note("0 2 world.a of the ranks 0"), ContainsSubstring("no part has 'x' of group 1 of 2"));
  CHECK_THAT(with_note("1 2 world.a of the ranks 0"), ContainsSubstring("no part has 'x' of group 0 of 2"));
  for (const char* note : {"", "1", "2 2", "-1 2", "a b", "1  2", "0 0", "99999999999999 2"})
    CHECK_THAT(with_note(note), ContainsSubstring("does not say of which group of ranks it is"));
  CHECK(with_note("0 1") == "(nothing was thrown)");
}

TEST_CASE("a model of which some ranks are left out of the call is not saved, and the group is named") {
  const TempDirectory folder;
  CHECK_NOTHROW(run_ranks(4, [&](World& world) {
    Run run(world, {2, 2}, Way::rows);
    const Group half = world.group().strided(2);
    const std::string message =
        message_of<ValueError>([&] { shard::save_checkpoint(run.net, folder / "half", half); });
    expect(message.find("the elements of '") != std::string::npos &&
               message.find("of the ranks 0, 1") != std::string::npos,
           "{}", message);
  }));
  CHECK_FALSE(std::filesystem::exists(folder / "half"));
}

TEST_CASE(
    "groups are told by their order, wherever their dimension is in the mesh, and with replicas in them") {
  using Mesh = std::pair<std::vector<int>, std::vector<std::string>>;
  const std::string model = "model", shards = "shards", replicas = "replicas";
  const Mesh meshes[] = {{{2, 2}, {model, shards}},
                         {{2, 2}, {shards, model}},
                         {{2, 2, 2}, {model, replicas, shards}},
                         {{2, 2, 2}, {replicas, model, shards}},
                         {{2, 2, 2}, {replicas, shards, model}}};
  const auto made = [&](const DeviceMesh& mesh, std::uint64_t seed) {
    manual_seed(seed + static_cast<std::uint64_t>(mesh.coordinate(model)));
    nn::Linear slice(5, 3);
    shard::fully_shard(slice,
                       {.mesh = mesh.dimensions() == 2 ? mesh[shards] : mesh.slice({replicas, shards})});
    return slice;
  };
  const auto world_of = [](const Mesh& mesh) {
    int ranks = 1;
    for (const int size : mesh.first) ranks *= size;
    return ranks;
  };
  const TempDirectory folder;
  for (const Mesh& from : meshes) {
    CHECK_NOTHROW(run_ranks(world_of(from), [&](World& world) {
      nn::Linear slice = made(world.mesh(from.first, from.second), 3);
      shard::save_checkpoint(slice, folder / "saved", world.group());
    }));
    for (const Mesh& to : meshes) {
      INFO("from " << fmt::format("{}", fmt::join(from.second, " ")) << " to "
                   << fmt::format("{}", fmt::join(to.second, " ")));
      CHECK_NOTHROW(run_ranks(world_of(to), [&](World& world) {
        const DeviceMesh mesh = world.mesh(to.first, to.second);
        nn::Linear slice = made(mesh, 7), expected = made(mesh, 3), other = made(mesh, 9);
        shard::load_checkpoint(slice, folder / "saved", world.group());
        shard::load_sharded_state_dict(other, shard::sharded_state_dict(slice), world.group());
        const nn::StateDict wanted = shard::full_state_dict(expected);
        for (nn::Linear* loaded : {&slice, &other})
          for (const auto& [name, tensor] : shard::full_state_dict(*loaded))
            expect(tensor.to_vector<float>() == wanted.at(name).to_vector<float>(), "another '{}'", name);
      }));
    }
  }
}

TEST_CASE("what one rank has for itself, and others in a group, is saved and loaded as each one's own") {
  const TempDirectory folder;
  for (const int alone : {0, 1, 2})
    for (const Way way : ways)
      CHECK_NOTHROW(run_ranks(3, [&](World& world) {
        const int first = alone == 0 ? 1 : 0, last = alone == 2 ? 1 : 2;
        const Group two = world.group().subgroup({first, last});
        const bool is_alone = world.rank() == alone;
        std::vector<shard::DataParallel> averages;
        const auto made = [&](std::uint64_t seed) {
          manual_seed(seed + (is_alone ? 1 : 0));
          auto net = std::make_unique<nn::Linear>(5, 3);
          shard::Options options;
          if (!is_alone) options.mesh = DeviceMesh(two, {2}, {"shards"});
          if (way == Way::flat) options.layout = shard::GroupLayout::flat;
          if (way == Way::replicated) options.strategy = shard::ShardingStrategy::no_shard;
          if (!is_alone && way == Way::averaged) averages.emplace_back(*net, two);
          if (!is_alone && way != Way::averaged) shard::fully_shard(*net, options);
          return net;
        };
        const auto net = made(3), other = made(7), third = made(9);
        const nn::StateDict wanted = shard::full_state_dict(*net);
        shard::save_checkpoint(*net, folder / "saved", world.group());
        shard::load_checkpoint(*other, folder / "saved", world.group());
        shard::load_sharded_state_dict(*third, shard::sharded_state_dict(*net), world.group());
        for (nn::Linear* into : {other.get(), third.get()})
          for (const auto& [name, tensor] : shard::full_state_dict(*into))
            expect(tensor.to_vector<float>() == wanted.at(name).to_vector<float>(), "another '{}'", name);
        const shard::SavedState saved(folder / "saved", "model");
        expect(saved.find("bias", alone == 0 ? 0 : 1)->saved_by == fmt::format("rank {} alone", alone),
               "it is of {}", saved.find("bias", 1)->saved_by);
      }));
}

TEST_CASE("a name that all ranks hold together on some of them, and fewer on others, is refused on all") {
  const TempDirectory folder;
  CHECK_NOTHROW(run_ranks(3, [&](World& world) {
    const Group two = world.group().subgroup({0, 1});
    const bool outside = world.rank() == 2;
    Mixed net;  // "free" is of all, and on the last rank "held" takes its place
    shard::fully_shard(outside ? net.held : net.free, {.mesh = world.mesh()});
    if (!outside) shard::fully_shard(net.held, {.mesh = DeviceMesh(two, {2}, {"shards"})});
    const shard::ShardedStateDict state = shard::sharded_state_dict(net);
    for (const bool saves : {true, false}) {
      const std::string message = message_on_all(world, [&] {
        if (saves)
          shard::save_checkpoint(net, folder / "x", world.group());
        else
          shard::load_sharded_state_dict(net, state, world.group());
      });
      expect(message.find("'held.") != std::string::npos && message.find("together") != std::string::npos,
             "{}", message);
    }
  }));
  CHECK_FALSE(std::filesystem::exists(folder / "x"));
}

TEST_CASE("whatever one rank's state of ranks has else than the others', it is refused on all, which go on") {
  using Spoil = std::function<void(shard::ShardedTensor&)>;
  const std::pair<const char*, Spoil> faults[] = {
      {"steps", [](shard::ShardedTensor& t) { t.steps = 17; }},
      {"dtype", [](shard::ShardedTensor& t) { t.values = to(t.values, f64); }},
      {"begin", [](shard::ShardedTensor& t) { t.begin += 1; }},
      {"replica", [](shard::ShardedTensor& t) { t.replicas = 3, t.replica = 1; }},
      {"no replica", [](shard::ShardedTensor& t) { t.replica = t.replicas + 1; }},
      {"shape", [](shard::ShardedTensor& t) { t.shape = {t.shape.numel() + 1}; }},
      {"values", [](shard::ShardedTensor& t) { t.values = {}; }},
      {"dimensions", [](shard::ShardedTensor& t) { t.values = reshape(t.values, {t.values.numel(), 1}); }},
      {"name", [](shard::ShardedTensor& t) { t.name = "another"; }}};
  const Sizes sizes{2, 2};
  for (const Way way : ways)
    for (const int at : {0, 1, 3})
      CHECK_NOTHROW(run_ranks(sizes.world(), [&](World& world) {
        Run run(world, sizes, way);
        run.train(1);
        const Values before = run.values();
        const shard::ShardedStateDict whole = shard::sharded_state_dict(run.net),
                                      moments = shard::sharded_optimizer_state(run.net, run.adamw);
        for (const auto& [what, spoil] : faults)
          for (const bool of_model : {true, false}) {
            shard::ShardedStateDict state = of_model ? whole : moments;
            const auto found = std::ranges::find_if(state, [&](const shard::ShardedTensor& t) {
              return t.name.ends_with("slice.linear.weight") ||
                     t.name.ends_with("slice.linear.weight.exp_avg");
            });
            expect(found != state.end() && found->values.numel() > 0, "there is none to spoil");
            if (world.rank() == at) spoil(*found);  // of what is averaged another rank gives the elements
            const std::string message = message_on_all(world, [&] {
              if (of_model)
                shard::load_sharded_state_dict(run.net, state, world.group());
              else
                shard::load_sharded_optimizer_state(run.net, run.adamw, state, world.group());
            });
            expect(message.find("slice.linear.weight") != std::string::npos ||
                       message.find("another") != std::string::npos,
                   "{}: {}", what, message);
            expect(run.values() == before, "something changed");
          }
        run.train(1);
      }));
}

TEST_CASE("a model in shards that is saved without its group is refused by the group's name") {
  const TempDirectory folder;
  CHECK_NOTHROW(run_ranks(2, [&](World&) {
    nn::Linear net(5, 3);
    shard::fully_shard(net);
    const std::string message =
        message_of<ValueError>([&] { shard::save_checkpoint(net, folder / "x", Group()); });
    expect(
        message.find("of the ranks 0, 1, which are not all among the 1 ranks of the call; give the group") !=
            std::string::npos,
        "{}", message);
  }));
  CHECK_FALSE(std::filesystem::exists(folder / "x"));
}

TEST_CASE("one file of a group has what one rank had, and names of unlike groups are not mixed") {
  const TempDirectory folder;
  CHECK_NOTHROW(run_ranks(4, [&](World& world) {
    const DeviceMesh mesh = world.mesh({2, 2}, {"a", "b"});
    Mixed net;
    const NoGrad guard;
    for (const auto& [part, axis] : {std::pair(&net.held, "a"), std::pair(&net.free, "b")}) {
      fill_(part->weight, world.rank() - mesh.coordinate(axis) * (axis[0] == 'a' ? 2 : 1));
      shard::fully_shard(*part, {.mesh = mesh[axis]});
    }
    shard::save_checkpoint(net, folder / "unlike", world.group());
  }));
  shard::merge_checkpoint(folder / "unlike", folder / "0.safetensors", {.group = 0});
  const nn::StateDict merged = nn::load_state(folder / "0.safetensors");
  CHECK(merged.at("held.weight").to_vector<float>() == std::vector<float>(15, 0.0F));
  CHECK(merged.at("free.weight").to_vector<float>() == std::vector<float>(15, 0.0F));
  const std::string message = message_of<ValueError>(
      [&] { shard::merge_checkpoint(folder / "unlike", folder / "1.safetensors", {.group = 1}); });
  INFO(message);
  CHECK_THAT(message,
             ContainsSubstring("group 1 of 'free.bias' is world.b of the ranks 2, 3 and of 'held.bias' "
                               "world.a of the ranks 1, 3, and no model has both"));
  CHECK_FALSE(std::filesystem::exists(folder / "1.safetensors"));
}

TEST_CASE(
    "an optimizer's state by names loads where its numbers stand for other parameters on other groups") {
  CHECK_NOTHROW(run_ranks(4, [&](World& world) {
    const DeviceMesh mesh = world.mesh({2, 2}, {"model", "shards"});
    manual_seed(3);
    Unlike net(mesh.coordinate("model"));
    shard::fully_shard(net.own, {.mesh = mesh["shards"]});
    shard::fully_shard(net.shared, {.mesh = world.mesh()});
    nn::AdamW adam(net.parameters(), {.lr = 0.1}), other(net.parameters(), {.lr = 0.1});
    net(ones({2, 5})).backward();
    adam.step();
    shard::load_sharded_optimizer_state(net, other, shard::sharded_optimizer_state(net, adam), world.group());
    const nn::StateDict wanted = shard::full_optimizer_state(net, adam);
    for (const auto& [name, tensor] : shard::full_optimizer_state(net, other))
      expect(to(tensor, f64).to_vector<double>() == to(wanted.at(name), f64).to_vector<double>(),
             "another '{}'", name);
  }));
}
