// Loads of some of a model and under other names: a sharded model takes from any save what a whole one takes
// of a state that was changed so, says the same of what one side alone has, and refuses the same.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "collectives/world.h"
#include "nn/layers.h"
#include "nn/state_file.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/checkpoint.h"
#include "shard/fully_shard.h"
#include "shard/run_state.h"
#include "shard/saved_state.h"
#include "shard/sharded_state.h"
#include "tests/catch.h"
#include "tests/shard/message_on_all.h"
#include "tests/shard/places.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;
using Path = std::filesystem::path;

namespace {

/// A tie, a buffer and sizes that no number of ranks divides.
struct Net final : nn::Layer<Net> {
  nn::Linear in{5, 7}, out{5, 7, {.bias = nn::Bias::no}}, head{7, 3};
  nn::Buffer mean{zeros({3})};
  Net() { nn::tie(in.weight, out.weight); }
  Tensor forward(const Tensor& x) const { return head(in(x)); }
  void visit(auto&& on) {
    on("in", in);
    on("out", out);
    on("head", head);
    on("mean", mean);
  }
};

Net made(const World& world, Way way, std::uint64_t seed) {
  manual_seed(seed);
  Net net;
  {
    const NoGrad guard;
    fill_(net.mean.tensor(), static_cast<double>(seed));
  }
  place(net.head, net, world, way);
  return net;
}

using Rename = std::function<std::string(const std::string&)>;
/// What a program does to a state before it loads it.
struct Change {
  const char* what;
  Rename rename;
};

std::string without(const std::string& name, std::string_view front) {
  return name.starts_with(front) ? name.substr(front.size()) : name;
}

const std::vector<Change> changes = {
    {"nothing", [](const std::string& name) { return name; }},
    {"a prefix less", [](const std::string& name) { return without(name, "module."); }},
    {"no head",
     [](const std::string& name) { return name.find("head.") == name.npos ? without(name, "module.") : ""; }},
    {"the head alone",
     [](const std::string& name) { return name.find("head.") != name.npos ? without(name, "module.") : ""; }},
    {"the tie by its other name",
     [](const std::string& name) {
       return name == "module.in.weight" || name == "in.weight" ? "out.weight" : without(name, "module.");
     }},
    {"another name", [](const std::string& name) { return "other." + name; }},
};

nn::StateDict changed(const nn::StateDict& state, const Rename& rename) {
  nn::StateDict result;
  for (const auto& [name, tensor] : state)
    if (const std::string to = rename(name); !to.empty()) result.emplace_back(to, tensor);
  return result;
}

using Values = std::vector<std::vector<float>>;
Values values(Net& net) {
  Values all;
  for (const auto& [name, tensor] : shard::full_state_dict(net)) all.push_back(tensor.to_vector<float>());
  return all;
}

/// What a load comes to: values, what one side alone has, or the error's kind.
struct Outcome {
  Values values;
  std::vector<std::string> missing, unknown;
  bool refused = false;
  bool operator==(const Outcome&) const = default;
};

template <class F>
Outcome outcome(Net& net, F&& load) {
  Outcome result;
  try {
    nn::Mismatch mismatch = load();
    result.missing = std::move(mismatch.missing), result.unknown = std::move(mismatch.unknown);
    std::ranges::sort(result.unknown);
  } catch (const ValueError&) {
    result.refused = true;
  }
  result.values = values(net);
  return result;
}

/// As programs of PyTorch save: the names have a prefix.
struct Wrapper final : nn::Layer<Wrapper> {
  Net module;
  explicit Wrapper(Net net) : module(std::move(net)) {}
  Tensor forward(const Tensor& x) const { return module(x); }
  void visit(auto&& on) { on("module", module); }
};

/// Saves of a model, with the prefix or without: by one rank, by three, and as one file.
std::vector<Path> saves(const TempDirectory& folder, bool wrapped) {
  std::vector<Path> paths;
  for (const int ranks : {1, 3}) {
    paths.push_back(folder / fmt::format("{} {}", ranks, wrapped));
    run_ranks(ranks, [&](World& world) {
      Wrapper net(made(world, Way::rows, 3));
      if (wrapped)
        shard::save_checkpoint(net, paths.back(), world.group());
      else
        shard::save_checkpoint(net.module, paths.back(), world.group());
    });
  }
  paths.push_back(folder / fmt::format("{}.safetensors", wrapped));
  nn::save_state(paths.back(), nn::load_state(paths[0] / "model.safetensors"));
  return paths;
}

}  // namespace

TEST_CASE("a sharded model takes from any save what a whole one takes of the same state, and says the same") {
  const TempDirectory folder;
  for (const bool wrapped : {false, true})
    for (const Path& from : saves(folder, wrapped)) {
      const Path whole = folder / fmt::format("{}.safetensors", wrapped);
      for (const nn::Strict strict : {nn::Strict::yes, nn::Strict::no})
        for (const Change& change : changes) {
          Outcome expected;
          run_ranks(1, [&](World& world) {
            Net net = made(world, Way::plain, 7);
            const nn::StateDict state = changed(nn::load_state(whole), change.rename);
            expected = outcome(net, [&] { return net.load_state_dict(state, strict); });
          });
          for (const int ranks : {1, 2, 3, 4})
            for (const Way way : ways) {
              INFO(from << ", strict " << (strict == nn::Strict::yes) << ", " << change.what << ", " << ranks
                        << " ranks, way " << static_cast<int>(way));
              CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
                Net net = made(world, way, 7), other = made(world, way, 7);
                const Outcome found = outcome(net, [&] {
                  return shard::load_checkpoint(net, from, world.group(),
                                                {.strict = strict, .rename = change.rename});
                });
                expect(found == expected, "another outcome: missing {}, unknown {}, refused {}",
                       fmt::join(found.missing, " "), fmt::join(found.unknown, " "), found.refused);
                const nn::StateDict state = changed(nn::load_state(whole), change.rename);
                expect(outcome(other, [&] { return shard::load_full_state_dict(other, state, strict); }) ==
                           expected,
                       "another outcome of load_full_state_dict");
              }));
            }
        }
    }
}

TEST_CASE("states of ranks in memory load in part, and say the same of what one side alone has") {
  for (const nn::Strict strict : {nn::Strict::yes, nn::Strict::no})
    for (const Change& change : changes) {
      Outcome expected;
      run_ranks(1, [&](World& world) {
        Net from = made(world, Way::plain, 3), net = made(world, Way::plain, 7);
        const nn::StateDict state = changed(from.state_dict(), change.rename);
        expected = outcome(net, [&] { return net.load_state_dict(state, strict); });
      });
      for (const int ranks : {1, 2, 3})
        for (const Way way : ways) {
          INFO(change.what << ", " << ranks << " ranks, way " << static_cast<int>(way));
          CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
            Net from = made(world, Way::rows, 3), net = made(world, way, 7);
            shard::ShardedStateDict state = shard::sharded_state_dict(from);
            for (shard::ShardedTensor& t : state) t.name = change.rename(t.name);
            std::erase_if(state, [](const shard::ShardedTensor& t) { return t.name.empty(); });
            expect(outcome(net,
                           [&] {
                             return shard::load_sharded_state_dict(net, state, world.group(), strict);
                           }) == expected,
                   "another outcome");
          }));
        }
    }
}

TEST_CASE(
    "a checkpoint without what is frozen loads wherever that is there, model and optimizer, on any ranks") {
  const auto frozen = [](const World& world, Way way, std::uint64_t seed) {
    manual_seed(seed);
    auto net = std::make_unique<Net>();
    manual_seed(11);
    const Net base;  // the same for all
    {
      const NoGrad guard;
      copy_(net->in.weight.data(), base.in.weight.data());
      copy_(net->in.bias.data(), base.in.bias.data());
    }
    net->in.set_requires_grad(false);
    place(net->head, *net, world, way);
    return net;
  };
  const auto optimizer_of = [](Net& net) { return nn::AdamW(net.head.parameters(), {.lr = 0.1}); };
  const auto step = [](Net& net, nn::AdamW& adam) {
    sum(net(ones({2, 5}, {}))).backward();
    adam.step(), adam.zero_grad();
  };
  const TempDirectory folder;
  for (const Way way : ways)
    for (const auto& [before, after] : {std::pair{1, 1}, {1, 2}, {2, 1}, {4, 2}}) {
      const Path path = folder / fmt::format("{} {} {}", static_cast<int>(way), before, after);
      INFO(path);
      Values saved, next;
      CHECK_NOTHROW(run_ranks(before, [&](World& world) {
        const auto net = frozen(world, way, 3);
        nn::AdamW adam = optimizer_of(*net);
        step(*net, adam);
        shard::save_checkpoint(*net, adam, path, world.group(), {.frozen = shard::Frozen::left_out});
        const Values now = values(*net);
        step(*net, adam);
        const Values then = values(*net);
        if (world.rank() == 0) saved = now, next = then;
      }));
      const shard::SavedState state(path, "model");
      std::vector<std::string> names;
      for (const shard::SavedTensor& t : state.tensors()) names.emplace_back(t.name);
      CHECK(names == std::vector<std::string>{"head.bias", "head.weight", "mean"});
      CHECK_NOTHROW(run_ranks(after, [&](World& world) {
        const auto net = frozen(world, way, 5);
        nn::AdamW adam = optimizer_of(*net);
        const Values old = values(*net);
        const std::string message =
            message_on_all(world, [&] { shard::load_checkpoint(*net, adam, path, world.group()); });
        expect(message.find("lacks 'in.") != message.npos && values(*net) == old, "{}", message);
        const nn::Mismatch mismatch =
            shard::load_checkpoint(*net, adam, path, world.group(), {.frozen = shard::Frozen::left_out});
        expect(mismatch.missing.empty() && mismatch.unknown.empty(), "frozen parameters are missing");
        expect(values(*net) == saved, "other values");
        step(*net, adam);
        expect(values(*net) == next, "another step");
        // What is trained has to be there.
        net->in.set_requires_grad(true);
        const std::string lacks = message_on_all(world, [&] {
          shard::load_checkpoint(*net, adam, path, world.group(), {.frozen = shard::Frozen::left_out});
        });
        expect(lacks.find("lacks 'in.") != lacks.npos, "{}", lacks);
      }));
    }
}

TEST_CASE("a run's state says of each model whether what is frozen is in it") {
  const TempDirectory folder;
  Net net, other;
  net.in.set_requires_grad(false), other.in.set_requires_grad(false);
  shard::RunState run;
  run.add("model", net, shard::Frozen::left_out).add("other", other);
  shard::save_checkpoint(run, folder / "run", {});
  CHECK(shard::SavedState(folder / "run", "model").find("in.weight") == nullptr);
  CHECK(shard::SavedState(folder / "run", "other").find("in.weight") != nullptr);
  CHECK_NOTHROW(shard::load_checkpoint(run, folder / "run", {}));
  CHECK_THROWS_AS(shard::save_checkpoint(run, folder / "again", {}, {.frozen = shard::Frozen::left_out}),
                  ValueError);
}

TEST_CASE("what does not load in part is one line with the file's name on every rank, and nothing changes") {
  const TempDirectory folder;
  const std::vector<Path> paths = saves(folder, false);
  const Path odd = folder / "odd.safetensors";
  {
    // A tensor of a dtype that is not here, under a name of the model.
    std::string header =
        R"({"in.bias":{"dtype":"I8","shape":[7],"data_offsets":[0,7]},"mean":{"dtype":"F32","shape":[4],)"
        R"("data_offsets":[7,23]}})";
    const std::uint64_t length = header.size();
    std::string text(sizeof length, '\0');
    std::memcpy(text.data(), &length, sizeof length);
    std::ofstream(odd, std::ios::binary) << text << header << std::string(23, '\0');
  }
  using Options = shard::LoadCheckpointOptions;
  const auto to_one = [](const std::string&) { return std::string("mean"); };
  const auto no_mean = [](const std::string& name) { return name == "mean" ? std::string() : name; };
  struct Refusal {
    Path from;
    Options options;
    std::vector<std::string> words;
  };
  const std::vector<Refusal> refusals = {
      {paths[1], {.rename = to_one}, {"index.json", "are both renamed to 'mean'"}},
      {paths[0], {.rename = no_mean}, {"model.safetensors", "lacks 'mean'", "pass Strict::no"}},
      {paths[2], {.rename = no_mean}, {"false.safetensors", "lacks 'mean'"}},
      {odd, {.strict = nn::Strict::no}, {"odd.safetensors", "'mean' has shape (3) in the module and (4)"}},
      {odd, {}, {"odd.safetensors", "lacks 'in.weight'"}},
      {paths[1], {.part = "ema"}, {"index.json", "has no ema"}},
      {paths[1], {.part = "../x"}, {"no name of a part"}},
      {folder / "nowhere", {}, {"nowhere"}}};
  for (const int ranks : {1, 3})
    for (const Refusal& refusal : refusals) {
      INFO(refusal.from << " on " << ranks);
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Net net = made(world, Way::rows, 7);
        const Values before = values(net);
        const std::string message = message_on_all(
            world, [&] { shard::load_checkpoint(net, refusal.from, world.group(), refusal.options); });
        for (const std::string& word : refusal.words)
          expect(message.find(word) != message.npos, "'{}' is not in '{}'", word, message);
        expect(values(net) == before, "something changed");
      }));
    }
  // Without the one that is of another shape: what cannot be read is missing, as of `nn::load_state`.
  CHECK_NOTHROW(run_ranks(3, [&](World& world) {
    Net net = made(world, Way::rows, 7);
    const nn::Mismatch mismatch =
        shard::load_checkpoint(net, odd, world.group(), {.strict = nn::Strict::no, .rename = no_mean});
    expect(mismatch.missing ==
                   std::vector<std::string>{"head.bias", "head.weight", "in.bias", "in.weight", "mean"} &&
               mismatch.unknown.empty(),
           "missing {}, unknown {}", fmt::join(mismatch.missing, " "), fmt::join(mismatch.unknown, " "));
  }));
}
