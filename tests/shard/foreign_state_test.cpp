// One rule for all calls that load a state: names of tied weights, prefixes, dtypes that are not here.
#include "collectives/world.h"
#include "nn/layers.h"
#include "nn/state_file.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/checkpoint.h"
#include "shard/fully_shard.h"
#include "tests/ranks.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

struct Tied final : nn::Layer<Tied> {
  nn::Linear in{3, 3, {.bias = nn::Bias::no}}, out{3, 3, {.bias = nn::Bias::no}};
  Tied() { nn::tie(in.weight, out.weight); }
  Tensor forward(const Tensor& x) const { return out(in(x)); }
  void visit(auto&& on) {
    on("in", in);
    on("out", out);
  }
};

/// Every way in which a whole state reaches a model.
using Load = std::function<void(Tied&, const nn::StateDict&, World&)>;
std::vector<std::pair<const char*, Load>> loads(const TempDirectory& folder) {
  return {
      {"load_state_dict", [](Tied& net, const nn::StateDict& state, World&) { net.load_state_dict(state); }},
      {"load_full_state_dict",
       [](Tied& net, const nn::StateDict& state, World&) { shard::load_full_state_dict(net, state); }},
      {"load_checkpoint", [&](Tied& net, const nn::StateDict& state, World& world) {
         const auto path = folder / "made" / "model.safetensors";
         if (world.rank() == 0) {
           std::filesystem::create_directories(folder / "made");
           std::filesystem::remove(path);
           nn::save_state(path, state);
         }
         world.group().barrier();
         shard::load_checkpoint(net, folder / "made", world.group());
       }}};
}

}  // namespace

TEST_CASE("loading: a tied weight comes under either name or both, through every call, sharded or not") {
  const TempDirectory folder;
  for (const auto& [name, load] : loads(folder))
    for (const int ranks : {1, 2}) {
      INFO(name << " on " << ranks);
      if (ranks > 1 && std::string_view(name) == "load_state_dict") continue;  // of this rank's parts
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        manual_seed(3);
        const Tensor w = rand({3, 3});
        for (const nn::StateDict& state : {nn::StateDict{{"in.weight", w}}, nn::StateDict{{"out.weight", w}},
                                           nn::StateDict{{"out.weight", w}, {"in.weight", clone(w)}}}) {
          Tied net;
          if (ranks > 1) shard::fully_shard(net);
          load(net, state, world);
          const Tensor found = shard::full_state_dict(net).at("in.weight");
          if (found.to_vector<float>() != w.to_vector<float>()) throw std::runtime_error("other values");
        }
        Tied net;
        if (ranks > 1) shard::fully_shard(net);
        const auto message =
            message_of<ValueError>([&] { load(net, {{"in.weight", w}, {"out.weight", w + 1}}, world); });
        if (message.find("one parameter") == std::string::npos) throw std::runtime_error(message);
        const auto wrapped = message_of<ValueError>([&] { load(net, {{"module.in.weight", w}}, world); });
        if (wrapped.find("take 'module.' off the front") == std::string::npos)
          throw std::runtime_error(wrapped);
      }));
    }
}

TEST_CASE("loading: the state of one rank's parts is not written as if it were the model") {
  const TempDirectory folder;
  CHECK_NOTHROW(run_ranks(2, [&](World& world) {
    Tied net;
    shard::fully_shard(net);
    const auto message = message_of<StateError>([&] { nn::save_state(folder / "x", net.state_dict()); });
    if (message.find("'in.weight'") == std::string::npos ||
        message.find("shard::save_checkpoint") == std::string::npos)
      throw std::runtime_error(message);
    const nn::StateDict whole = shard::full_state_dict(net);
    if (world.rank() == 0) nn::save_state(folder / "whole", whole);
  }));
  CHECK_FALSE(std::filesystem::exists(folder / "x"));
  CHECK(nn::load_state(folder / "whole").at("in.weight").shape() == Shape{3, 3});
}
