#include "tests/shard/scaler_runs.h"

#include <sherd.h>

#include <cmath>
#include <limits>

#include "tests/ranks.h"

namespace sherd::test {
namespace {

/// No dimension divides by 2, 3 or 4 alike, and one parameter has fewer rows than there are ranks.
struct Net final : nn::Layer<Net> {
  nn::Linear a{5, 7}, b{7, 3}, c{3, 1};
  Tensor forward(const Tensor& x) { return c(gelu(b(gelu(a(x))))); }
  void visit(auto&& on) {
    on("a", a);
    on("b", b);
    on("c", c);
  }
};

struct Way {
  std::string name;
  std::optional<shard::Options> options{};  ///< none: DataParallel
};

std::vector<Way> ways(World& world, const shard::MixedPrecisionPolicy& precision) {
  using shard::GroupLayout, shard::ShardingStrategy;
  std::vector<Way> all;
  for (const GroupLayout layout : {GroupLayout::per_parameter, GroupLayout::flat})
    for (const ShardingStrategy strategy : {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op,
                                            ShardingStrategy::zero1, ShardingStrategy::no_shard})
      all.push_back(
          {fmt::format("layout {} strategy {}", static_cast<int>(layout), static_cast<int>(strategy)),
           shard::Options{
               .mesh = world.mesh(), .layout = layout, .strategy = strategy, .mixed_precision = precision}});
  if (world.size() % 2 == 0)
    all.push_back({"hybrid", shard::Options{.mesh = world.mesh({2, world.size() / 2}, {"replicas", "shards"}),
                                            .mixed_precision = precision}});
  if (!precision.param_dtype) all.push_back({"data parallel"});
  return all;
}

std::vector<std::vector<float>> own_values(const nn::Module& net) {
  std::vector<std::vector<float>> values;
  for (const nn::Parameter& p : net.parameters())
    values.push_back(contiguous(p.local().detach()).to_vector<float>());
  return values;
}

/// What every rank says, by rank.
std::vector<double> everyones(const World& world, double value) {
  const Tensor all = empty({world.size()}, {f64});
  world.group().all_gather(all, Tensor::from({value}, {1}));
  return all.to_vector<double>();
}

void expect_same(const World& world, double value, std::string_view what, const Way& way, int step) {
  for (const double other : everyones(world, value))
    expect(other == value, "{}: step {}: {} is {} here and {} elsewhere", way.name, step, what, value, other);
}

/// Puts a value that is not finite into this rank's part of one gradient, where it has one.
bool plant(const nn::Module& net, int step) {
  std::vector<Tensor> own;
  for (const nn::Parameter& p : net.parameters())
    if (const Tensor g = p.grad(); g.defined() && g.numel() > 0) own.push_back(g);
  if (own.empty()) return false;
  const Tensor g = flatten(own[static_cast<std::size_t>(step) % own.size()]);
  fill_(narrow(g, 0, g.numel() - 1, 1),
        step % 2 == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN());
  return true;
}

enum class Overflow { planted, natural };

int scaled_run(World& world, const Way& way, Overflow overflow) {
  manual_seed(3);
  Net net;
  std::optional<shard::DataParallel> replicas;
  if (way.options) {
    for (nn::Module* m : {static_cast<nn::Module*>(&net.a), static_cast<nn::Module*>(&net.b)})
      shard::fully_shard(*m, *way.options);
    shard::fully_shard(net, *way.options);
  } else {
    replicas.emplace(net, world.group());
  }
  nn::AdamW optimizer(net.parameters(), {.lr = 0.05});
  nn::GradScaler scaler({.init_scale = overflow == Overflow::planted ? 0x1p4 : 0x1p30, .growth_interval = 3});
  int skips = 0;
  for (int step = 0; step < 24; ++step) {
    manual_seed(static_cast<std::uint64_t>(100 + step * world.size() + world.rank()));
    const double before = scaler.scale_tensor().item();
    scaler.scale(mean(square(net(randn({4, 5}))))).backward();
    const bool meant = overflow == Overflow::planted && step % 3 == 1;
    bool planted = false;
    // Replicas have equal gradients: an average that is not finite is so on all of them.
    const bool everywhere = !way.options || way.options->strategy == shard::ShardingStrategy::no_shard;
    if (meant && (everywhere || step / 3 % world.size() == world.rank())) planted = plant(net, step);
    double any_planted = 0;
    for (const double other : everyones(world, planted ? 1 : 0)) any_planted += other;

    const auto values = own_values(net);
    if (step % 2 == 0) {
      scaler.unscale_(optimizer);
      shard::clip_grad_norm_(net.parameters(), 1.0);
    }
    const bool skipped = scaler.step(optimizer).item() != 0;
    scaler.update();
    optimizer.zero_grad();
    skips += skipped;
    expect_same(world, skipped ? 1 : 0, "skipped", way, step);
    expect_same(world, scaler.scale_tensor().item(), "the scale", way, step);
    if (overflow == Overflow::planted)
      expect(skipped == (any_planted > 0), "{}: step {} is {} with {} ranks' gradients not finite", way.name,
             step, skipped ? "skipped" : "made", any_planted);
    if (skipped) {
      expect(own_values(net) == values, "{}: step {} was skipped and changed a value", way.name, step);
      expect(scaler.scale_tensor().item() == before / 2,
             "{}: step {} was skipped, the scale went from {} to {}", way.name, step, before,
             scaler.scale_tensor().item());
    }
    for (const auto& list : own_values(net))
      for (const float value : list)
        expect(std::isfinite(value), "{}: step {} left a value that is not finite", way.name, step);
  }
  expect(skips > 0 && skips < 24, "{}: {} of 24 steps were skipped", way.name, skips);
  return skips;
}

}  // namespace

int check_scaled_runs(World& world) {
  int skips = 0;
  for (const Way& way : ways(world, {})) skips += scaled_run(world, way, Overflow::planted);
  for (const DType reduce : {f16, f32})
    for (const Way& way : ways(world, {.param_dtype = f16, .reduce_dtype = reduce})) {
      skips += scaled_run(world, way, Overflow::planted);
      skips += scaled_run(world, way, Overflow::natural);
    }
  return skips;
}

}  // namespace sherd::test
