// A world of one on a GPU: the engine's groups, gathers, reductions and mixed precision, without peers.
#include <map>

#include "autograd/capture/capture.h"
#include "collectives/world.h"
#include "nn/gpt.h"
#include "nn/optimizer.h"
#include "shard/data_parallel.h"
#include "shard/fully_shard.h"
#include "tests/captured_calls.h"
#include "tests/cuda/agree.h"
#include "tests/rank_device.h"
#include "tests/ranks.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr nn::GptOptions small{.layers = 2, .heads = 4, .width = 128, .context = 32, .vocab = 256};

/// Losses of five steps on tokens that are drawn now.
std::vector<double> train(nn::Gpt& model, Device device) {
  nn::AdamW optimizer(model.parameters(), {.lr = 1e-2});
  const Tensor tokens = to(randint(0, 256, {4, 32}, {i64}), device),
               targets = to(randint(0, 256, {128}, {i64}), device);
  std::vector<double> all;
  for (int i = 0; i < 5; ++i) {
    const Tensor loss =
        cross_entropy(flatten(model(tokens), 0, 1), targets, {.precision = LossPrecision::wide});
    loss.backward();
    shard::clip_grad_norm_(model.parameters(), 1);
    optimizer.step();
    optimizer.zero_grad();
    all.push_back(loss.item());
  }
  return all;
}

/// Losses of a model that is cut as `options` say, if there are any.
std::vector<double> losses(const std::optional<shard::Options>& options) {
  manual_seed(3);
  nn::Gpt model(small);
  model.to(gpu);
  if (options) {
    for (nn::GptBlock& block : model.blocks) shard::fully_shard(block, *options);
    shard::fully_shard(model, *options);
  }
  const std::vector<double> all = train(model, gpu);
  for (const nn::Parameter& p : model.parameters()) {
    CHECK(p.local().device() == gpu);
    CHECK(p.local().dtype() == f32);
  }
  return all;
}

}  // namespace

TEST_CASE(
    "cuda: a world of one trains sharded to the bits of the plain model, in every layout and strategy") {
  if (no_gpu()) return;
  run_ranks(1, [](World& world) {
    const std::vector<double> plain = losses({});
    CHECK(plain.back() < plain.front());
    for (const auto layout : {shard::GroupLayout::flat, shard::GroupLayout::per_parameter})
      for (const auto strategy : {shard::ShardingStrategy::full_shard, shard::ShardingStrategy::shard_grad_op,
                                  shard::ShardingStrategy::zero1, shard::ShardingStrategy::no_shard}) {
        INFO("layout " << static_cast<int>(layout) << " strategy " << static_cast<int>(strategy));
        CHECK(losses(shard::Options{.mesh = world.mesh(), .layout = layout, .strategy = strategy}) == plain);
      }
  });
}

TEST_CASE("cuda: a world of one computes in halves over f32 masters") {
  if (no_gpu()) return;
  run_ranks(1, [](World& world) {
    const std::vector<double> plain = losses({});
    for (const DType dtype : {bf16, f16})
      for (const auto layout : {shard::GroupLayout::flat, shard::GroupLayout::per_parameter}) {
        INFO(name_of(dtype));
        const std::vector<double> mixed = losses(shard::Options{
            .mesh = world.mesh(), .layout = layout, .mixed_precision = {.param_dtype = dtype}});
        for (std::size_t i = 0; i < plain.size(); ++i) CHECK(std::abs(mixed[i] - plain[i]) < 0.05 * plain[i]);
        CHECK(mixed != plain);
      }
  });
}

namespace {

/// How ranks divide a model among them.
struct Way {
  std::string name;
  std::optional<shard::Options> options;  ///< none: DataParallel
  bool hybrid = false;                    ///< in shards over pairs of ranks, which are replicas of each other
};

std::vector<Way> ways(int ranks) {
  std::vector<Way> all{{"data parallel", {}}};
  for (const auto layout : {shard::GroupLayout::flat, shard::GroupLayout::per_parameter})
    for (const auto strategy : {shard::ShardingStrategy::full_shard, shard::ShardingStrategy::shard_grad_op,
                                shard::ShardingStrategy::zero1, shard::ShardingStrategy::no_shard})
      all.push_back(
          {fmt::format("layout {} strategy {}", static_cast<int>(layout), static_cast<int>(strategy)),
           shard::Options{.layout = layout, .strategy = strategy}});
  all.push_back({"offload", shard::Options{.cpu_offload = true}});
  if (ranks == 4)
    for (const auto layout : {shard::GroupLayout::flat, shard::GroupLayout::per_parameter})
      all.push_back({fmt::format("hybrid, layout {}", static_cast<int>(layout)),
                     shard::Options{.layout = layout}, true});
  return all;
}

/// Losses of this rank in five steps, each rank with tokens of its own.
std::vector<double> losses_among(const World& world, const Way& way, DType param_dtype, Device device) {
  manual_seed(3);
  nn::Gpt model(small);
  if (!way.options || !way.options->cpu_offload) model.to(device);
  std::optional<shard::DataParallel> replicas;
  if (way.options) {
    shard::Options options = *way.options;
    options.mesh = way.hybrid ? world.mesh({2, 2}, {"replica", "shard"}) : world.mesh();
    if (options.cpu_offload) options.device = device;
    options.mixed_precision.param_dtype = param_dtype;
    if (param_dtype == bf16) options.mixed_precision.reduce_dtype = f32;
    for (nn::GptBlock& block : model.blocks) shard::fully_shard(block, options);
    shard::fully_shard(model, options);
  } else {
    replicas.emplace(model, world.group());
  }
  manual_seed(100 + static_cast<std::uint64_t>(world.rank()));
  return train(model, device);
}

void train_alike(std::string_view where) {
  for (const int ranks : {2, 3, 4})
    for (const DType dtype : {f32, bf16}) {
      std::map<std::string, std::vector<std::vector<double>>> by_way;
      for (const Way& way : ways(ranks)) {
        if (!way.options && dtype != f32) continue;  // replicas compute in their parameters' dtype
        INFO(way.name << " on " << ranks << " ranks in " << name_of(dtype));
        std::vector<std::vector<double>> all(static_cast<std::size_t>(ranks));
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          all[static_cast<std::size_t>(world.rank())] = losses_among(world, way, dtype, rank_device(where));
        }));
        CHECK(all[0].back() < all[0].front());
        by_way[way.name] = all;
      }
      const std::vector<std::vector<double>>& first = by_way.begin()->second;
      for (const auto& [name, all] : by_way) {
        INFO(name << " on " << ranks << " ranks in " << name_of(dtype));
        if (name.starts_with("hybrid")) {  // sums of sums
          CHECK(all == by_way.at("hybrid, layout 0"));
          for (std::size_t r = 0; r < all.size(); ++r)
            CHECK(std::abs(all[r][1] - first[r][1]) < 1e-3 * first[r][1]);
        } else if (name != "offload") {
          CHECK(all == first);
        } else {  // steps are the host's, which round otherwise; from then on training drifts apart
          for (std::size_t r = 0; r < all.size(); ++r) {
            CHECK(all[r][0] == first[r][0]);
            CHECK(std::abs(all[r][1] - first[r][1]) < 1e-3 * first[r][1]);
          }
        }
      }
    }
}

}  // namespace

TEST_CASE("cuda ranks: every layout, strategy and data parallel train to the same bits on a shared GPU") {
  if (no_gpu()) return;
  train_alike("cuda:0");
}

TEST_CASE("cuda ranks: every layout, strategy and data parallel train to the same bits on several GPUs") {
  if (one_gpu()) return;
  train_alike("cuda:each");
}

namespace {

/// Losses and whole parameters of steps on one batch a rank, of which all but the first two are replays if
/// `captured`.
std::vector<Tensor> results(World& world, const shard::Options& options, bool captured, Device device) {
  manual_seed(3);
  nn::Gpt model(small);
  model.to(device);
  for (nn::GptBlock& block : model.blocks) shard::fully_shard(block, options);
  shard::fully_shard(model, options);
  nn::AdamW optimizer(model.parameters(), {.lr = 1e-2});
  const Step step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
    const Tensor loss = cross_entropy(flatten(model(in[0]), 0, 1), in[1], {.precision = LossPrecision::wide});
    loss.backward();
    shard::clip_grad_norm_(model.parameters(), 1);
    optimizer.step();
    optimizer.zero_grad();
    return {loss.detach()};
  };
  std::vector<Tensor> all;
  std::optional<Program> program;
  for (int i = 0; i < 6; ++i) {
    manual_seed(static_cast<std::uint64_t>(10 * world.rank() + i));
    const std::vector<Tensor> in{to(randint(0, 256, {4, 32}, {i64}), device),
                                 to(randint(0, 256, {128}, {i64}), device)};
    if (!captured || i < 2)
      all.push_back(step(in)[0]);
    else if (!program)
      all.push_back((program = capture(step, in))->outputs()[0]);
    else
      all.push_back(program->replay(in)[0]);
  }
  if (captured) expect(program->is_device_graph(), "not a graph");
  for (const auto& [name, tensor] : shard::full_state_dict(model)) all.push_back(tensor);
  return all;
}

void capture_alike(std::string_view where) {
  for (const int ranks : {1, 2, 3})
    for (const auto layout : {shard::GroupLayout::flat, shard::GroupLayout::per_parameter})
      for (const auto strategy : {shard::ShardingStrategy::full_shard, shard::ShardingStrategy::no_shard})
        for (const bool narrow : {false, true}) {
          INFO(ranks << " ranks, layout " << int(layout) << ", strategy " << int(strategy)
                     << (narrow ? ", bf16" : ""));
          CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
            shard::Options options{.mesh = world.mesh(), .layout = layout, .strategy = strategy};
            if (narrow) options.mixed_precision = {.param_dtype = bf16, .reduce_dtype = f32};
            const Device device = rank_device(where);
            const std::vector<Tensor> eager = results(world, options, false, device),
                                      graphs = results(world, options, true, device);
            for (std::size_t i = 0; i < eager.size(); ++i)
              expect(same_bits(eager[i], graphs[i]), "result {} differs", i);
          }));
        }
}

}  // namespace

TEST_CASE("cuda: captured sharded steps run as graphs between the calls, with the steps' bits") {
  if (no_gpu()) return;
  capture_alike("cuda:0");
}

TEST_CASE("cuda: captured sharded steps run as graphs on several GPUs") {
  if (one_gpu()) return;
  capture_alike("cuda:each");
}

TEST_CASE("cuda: captured calls of every kind give the step's bits") {
  if (no_gpu()) return;
  check_captured_calls("cuda:0", {2, 3}, Makes::hosts);
}

TEST_CASE("cuda: captured calls of every kind give the step's bits where several GPUs make them") {
  if (one_gpu()) return;
  check_captured_calls("cuda:each", {2}, Makes::devices);
  check_captured_faults("cuda:each");
}
