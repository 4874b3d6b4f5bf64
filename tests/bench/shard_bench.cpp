// Training steps of sharded models on ranks that are threads, one JSON line each, medians; beside them the
// same steps of unsharded models on the same ranks in the same run, in turn.
//
//   shard_bench [--ranks 2] [--only mlp,transformer,groups,wrapping,one_group,memory,offload]
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <span>

#include "sherd.h"
#include "tests/bench/mlp.h"

namespace {

using namespace sherd;
using nlohmann::json;
using shard::GroupLayout;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// The time below which `share` of them lie.
double quantile(std::vector<double> times, double share) {
  const auto at = times.begin() + static_cast<std::ptrdiff_t>(share * static_cast<double>(times.size() - 1));
  std::nth_element(times.begin(), at, times.end());
  return *at;
}
double median(const std::vector<double>& times) { return quantile(times, 0.5); }
/// What the step takes when nothing else runs, also where something does: ranks wait for whoever the system
/// does not schedule.
double undisturbed(const std::vector<double>& times) { return quantile(times, 0.05); }

std::uint64_t system_allocations() { return Context::current().cpu_pool().system_allocations(); }

/// One model in training. Every rank calls `step` equally often.
struct Job {
  std::string how;
  std::function<void()> step;
  std::uint64_t allocations = 0;  ///< of ten steps, after two
  std::vector<double> times;
};

void steps(Job& job, int count) {
  for (int i = 0; i < count; ++i) job.step();
}

/// Times the jobs in turn, so that whatever slows the machine slows all of them.
void time_jobs(std::vector<Job>& jobs, int rounds, int batch) {
  for (Job& job : jobs) {
    steps(job, 2);
    const std::uint64_t before = system_allocations();
    steps(job, 10);
    job.allocations = system_allocations() - before;
  }
  for (int round = 0; round < rounds; ++round)
    for (Job& job : jobs)
      for (int i = 0; i < batch; ++i) {
        const double start = now();
        job.step();
        job.times.push_back(now() - start);
      }
}

void report(World& world, const json& line) {
  if (world.rank() == 0) {
    std::puts(line.dump().c_str());
    std::fflush(stdout);
  }
}

/// A line for each job, with its time over the first job's.
void report(World& world, const char* what, std::vector<Job>& jobs, int rounds, int batch) {
  time_jobs(jobs, rounds, batch);
  const double first = median(jobs[0].times);
  for (const Job& job : jobs) {
    const Tensor allocations = Tensor::from({static_cast<std::int64_t>(job.allocations)}, {1});
    world.group().all_reduce(allocations);
    report(world, {{"what", what},
                   {"how", job.how},
                   {"us", median(job.times) * 1e6},
                   {"undisturbed_us", undisturbed(job.times) * 1e6},
                   {"of_" + jobs[0].how, median(job.times) / first},
                   {"allocations_of_10_steps", allocations.to_vector<std::int64_t>()[0]}});
  }
}

/// A model, what averages its gradients, and its optimizer.
template <class Model, class Optimizer>
struct Training {
  Model model;
  std::unique_ptr<shard::DataParallel> replicas{};
  std::unique_ptr<Optimizer> optimizer{};
};

/// A job that trains `make()` after `wrap`; `loss` is one forward.
template <class Optimizer, class Make, class Loss>
Job job(std::string how, const Make& make, auto optimizer_options, Loss loss, auto wrap) {
  using Model = decltype(make());
  manual_seed(0);
  auto training = std::make_shared<Training<Model, Optimizer>>(Training<Model, Optimizer>{make()});
  wrap(*training);
  training->optimizer = std::make_unique<Optimizer>(training->model.parameters(), optimizer_options);
  return {std::move(how), [training, loss] {
            loss(training->model).backward();
            training->optimizer->step();
            training->optimizer->zero_grad();
          }};
}

/// The ways in which a model is trained here: plain, as a replica, and in both layouts, where
/// `modules(model)` become groups before the model itself does.
template <class Optimizer, class Make, class Loss, class Modules>
std::vector<Job> all_ways(World& world, const Make& make, auto options, Loss loss, const Modules& modules) {
  const auto cut = [&](GroupLayout layout) {
    return [&modules, layout](auto& training) {
      for (nn::Module* m : modules(training.model)) shard::fully_shard(*m, {.layout = layout});
      shard::fully_shard(training.model, {.layout = layout});
    };
  };
  const auto replicate = [&](auto& training) {
    training.replicas = std::make_unique<shard::DataParallel>(training.model, world.group());
  };
  std::vector<Job> jobs;
  jobs.push_back(job<Optimizer>("plain", make, options, loss, [](auto&) {}));
  jobs.push_back(job<Optimizer>("data_parallel", make, options, loss, replicate));
  jobs.push_back(job<Optimizer>("per_parameter", make, options, loss, cut(GroupLayout::per_parameter)));
  jobs.push_back(job<Optimizer>("flat", make, options, loss, cut(GroupLayout::flat)));
  return jobs;
}

// ---- three MLPs

void bench_mlp(World& world) {
  const Tensor x = rand({2, 16});
  auto jobs = all_ways<nn::Adam>(
      world, [] { return nn::Sequential(bench::Mlp{}, bench::Mlp{}, bench::Mlp{}); },
      nn::AdamOptions{.lr = 1e-2}, [x](auto& model) { return sum(model(x)); },
      [](nn::Sequential& model) { return std::vector{&model[0], &model[1], &model[2]}; });
  report(world, "three MLP(16), Adam", jobs, 20, 50);
}

// ---- Transformers

void bench_transformer(World& world) {
  const Tensor src = rand({20, 8, 32}), tgt = rand({10, 8, 32});
  auto jobs = all_ways<nn::Adam>(
      world,
      [] {
        return nn::Transformer(
            {.width = 32, .heads = 8, .encoder_layers = 2, .decoder_layers = 2, .feedforward = 128});
      },
      nn::AdamOptions{.lr = 1e-3}, [=](auto& model) { return sum(model(src, tgt)); },
      [](nn::Transformer& model) {
        std::vector<nn::Module*> layers;
        for (auto& layer : model.encoder.layers) layers.push_back(&layer);
        for (auto& layer : model.decoder.layers) layers.push_back(&layer);
        return layers;
      });
  report(world, "Transformer(32), Adam", jobs, 10, 20);
}

void bench_gpt(World& world) {
  const Tensor tokens = randint(0, 8, {4, 16}), targets = randint(0, 8, {4 * 16});
  auto jobs = all_ways<nn::Adam>(
      world,
      [] {
        return nn::Gpt({.layers = 2, .heads = 4, .width = 16, .context = 16, .vocab = 8, .dropout = 0.1});
      },
      nn::AdamOptions{.lr = 1e-3},
      [=](auto& model) { return cross_entropy(flatten(model(tokens), 0, 1), targets); },
      [](nn::Gpt& model) {
        std::vector<nn::Module*> blocks;
        for (auto& block : model.blocks) blocks.push_back(&block);
        return blocks;
      });
  report(world, "Gpt(16), Adam", jobs, 10, 20);
}

// ---- what the engine adds

/// Almost no work.
struct Scale final : nn::Layer<Scale> {
  nn::Param weight;
  explicit Scale(std::int64_t n) : weight(ones({n})) {}
  Tensor forward(const Tensor& x) const { return mul(x, weight); }
  void visit(auto&& on) { on("weight", weight); }
};

struct Scales final : nn::Layer<Scales> {
  nn::ModuleList<Scale> layers;
  Scales(int count, std::int64_t n) {
    for (int i = 0; i < count; ++i) layers.emplace_back(n);
  }
  Tensor forward(Tensor x) const {
    for (const Scale& layer : layers) x = layer(x);
    return x;
  }
  void visit(auto&& on) { on("layers", layers); }
};

/// One within the other.
struct Nested final : nn::Layer<Nested> {
  nn::Param weight;
  nn::ModuleList<Nested> within;
  explicit Nested(int depth) : weight(ones({4})) {
    if (depth > 1) within.emplace_back(depth - 1);
  }
  Tensor forward(const Tensor& x) const {
    const Tensor y = mul(x, weight);
    return within.size() > 0 ? within[0](y) : y;
  }
  void visit(auto&& on) {
    on("weight", weight);
    on("within", within);
  }
};

std::vector<nn::Module*> each_layer(Scales& model) {
  std::vector<nn::Module*> layers;
  for (Scale& layer : model.layers) layers.push_back(&layer);
  return layers;
}

void bench_groups(World& world) {
  constexpr int groups = 200;
  const Tensor x = rand({4});
  auto jobs = all_ways<nn::Sgd>(
      world, [] { return Scales(groups, 4); }, nn::SgdOptions{.lr = 1e-3},
      [x](auto& model) { return sum(model(x)); }, each_layer);
  report(world, "200 layers of 4 floats, SGD", jobs, 10, 20);
  for (const Job& job : jobs)
    report(world, {{"what", "added a group and step"},
                   {"how", job.how},
                   {"us", (median(job.times) - median(jobs[0].times)) * 1e6 / groups},
                   {"undisturbed_us", (undisturbed(job.times) - undisturbed(jobs[0].times)) * 1e6 / groups}});
}

/// What sharding takes, and what the first forward and backward take over a later one; by units, and by
/// modules within one another.
void bench_wrapping(World& world) {
  const auto time = [](const auto& act) {
    const double start = now();
    act();
    return now() - start;
  };
  const auto measure = [&](const char* what, int count, auto& model, std::span<nn::Module* const> inner) {
    const Tensor x = rand({4});
    const double wrapping = time([&] {
      for (nn::Module* m : inner) shard::fully_shard(*m);
      shard::fully_shard(model);
    });
    const auto step = [&] { sum(model(x)).backward(); };
    const double first = time(step), later = time(step);
    report(world, {{"what", what},
                   {"units", count},
                   {"wrapping_ms", wrapping * 1e3},
                   {"first_step_ms", first * 1e3},
                   {"later_step_ms", later * 1e3}});
  };
  for (const int count : {1000, 2000, 4000}) {
    Scales model(count, 4);
    measure("units beside each other", count, model, each_layer(model));
  }
  for (const int depth : {40, 80, 160}) {
    Nested model(depth);
    std::vector<nn::Module*> inner;  // the innermost first
    for (Nested* m = &model; m->within.size() > 0; m = &m->within[0])
      inner.insert(inner.begin(), &m->within[0]);
    measure("units within each other", depth, model, inner);
  }
}

void bench_one_group(World& world) {
  const Tensor x = rand({16});
  auto jobs = all_ways<nn::Sgd>(
      world, [] { return Scales(1000, 16); }, nn::SgdOptions{.lr = 1e-3},
      [x](auto& model) { return sum(model(x)); }, [](Scales&) { return std::vector<nn::Module*>{}; });
  jobs.erase(jobs.begin());  // against the replica
  report(world, "1000 layers of 16 floats, one group, SGD", jobs, 10, 10);
}

// ---- memory

struct Wide final : nn::Layer<Wide> {
  nn::ModuleList<nn::Linear> layers;
  Wide() {
    for (int i = 0; i < 16; ++i) layers.emplace_back(512, 512);
  }
  Tensor forward(Tensor x) const {
    for (const nn::Linear& layer : layers) x = layer(x);
    return x;
  }
  void visit(auto&& on) { on("layers", layers); }
};

/// The most that this rank's tensors took at once in three steps. Everything that the pool got from the
/// system lies there when the model is gone.
double peak_bytes(World& world, const std::function<void(Wide&)>& wrap) {
  CpuPool& pool = Context::current().cpu_pool();
  manual_seed(0);
  {
    Wide model;
    wrap(model);
    nn::Adam optimizer(model.parameters());
    pool.trim();  // what building the whole model took
    const Tensor x = rand({1, 512});
    for (int i = 0; i < 3; ++i) {
      sum(model(x)).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  world.group().barrier();  // the peers have read what calls held
  const double bytes = static_cast<double>(pool.cached_bytes());
  pool.trim();
  return bytes;
}

void bench_memory(World& world) {
  const double plain = peak_bytes(world, [](Wide&) {});
  for (GroupLayout layout : {GroupLayout::per_parameter, GroupLayout::flat}) {
    double shards = 0, largest = 0;
    const double peak = peak_bytes(world, [&](Wide& model) {
      for (nn::Linear& layer : model.layers) shard::fully_shard(layer, {.layout = layout});
      shard::fully_shard(model, {.layout = layout});
      for (const shard::GroupReport& group : shard::groups_of(model)) {
        const double width = static_cast<double>(size_of(group.dtype));
        shards += static_cast<double>(group.shard_numel) * width;
        largest = std::max(largest, static_cast<double>(group.gathered_numel) * width);
      }
    });
    // Values, gradients and two moments of every shard; of whole groups the one at work, the one on its way,
    // its gradients, and what is being reduced.
    const double predicted = 4 * shards + 4 * largest;
    report(world, {{"what", "peak memory a rank"},
                   {"how", layout == GroupLayout::flat ? "flat" : "per_parameter"},
                   {"mb", peak / 1e6},
                   {"predicted_mb", predicted / 1e6},
                   {"of_predicted", peak / predicted},
                   {"of_plain", peak / plain}});
  }
}

// ---- offloading

struct Offloaded {
  const char* how;
  bool offload, early;
};
constexpr Offloaded offloaded_ways[] = {
    {"kept", false, false}, {"offloaded", true, false}, {"offloaded_stepped_in_backward", true, true}};

void shard_wide(Wide& model, GroupLayout layout, bool offload) {
  shard::Options options{.layout = layout};
  if (offload) options.compute_device = Device::cpu(1);
  for (nn::Linear& layer : model.layers) shard::fully_shard(layer, options);
  shard::fully_shard(model, options);
}

/// Steps of both ways in turn; and the most that lay where is computed: of all that the rank held at once,
/// what is neither a shard nor an optimizer's state, if these are elsewhere. (Averages are elsewhere too, and
/// count.)
void bench_offload(World& world) {
  const Tensor x = rand({32, 512});
  for (const GroupLayout layout : {GroupLayout::per_parameter, GroupLayout::flat}) {
    std::vector<Job> jobs;
    double kept_peak = 0;
    for (const Offloaded& way : offloaded_ways) {
      manual_seed(0);
      MemoryLedger& memory = Context::current().memory();
      const HeldMemory before = memory.held(DeviceType::cpu);
      auto model = std::make_shared<Wide>();
      shard_wide(*model, layout, way.offload);
      auto adam = std::make_shared<nn::Adam>(model->parameters());
      std::shared_ptr<shard::StepInBackward> scope;
      if (way.early) scope = std::make_shared<shard::StepInBackward>(*adam);
      jobs.push_back({way.how, [=] {
                        sum((*model)(x)).backward();
                        if (!scope) adam->step();
                        adam->zero_grad();
                      }});
      steps(jobs.back(), 2);
      memory.reset_peak(DeviceType::cpu);
      steps(jobs.back(), 2);
      const HeldMemory held = memory.held(DeviceType::cpu);
      double peak =
          static_cast<double>(memory.peak(DeviceType::cpu) -
                              std::accumulate(before.bytes.begin(), before.bytes.end(), std::int64_t{0}));
      for (const MemoryUse use : {MemoryUse::parameters, MemoryUse::optimizer})
        if (way.offload) peak -= static_cast<double>(held[use] - before[use]);
      if (!way.offload) kept_peak = peak;
      report(world, {{"what", "peak memory of a rank where it computes"},
                     {"layout", layout == GroupLayout::flat ? "flat" : "per_parameter"},
                     {"how", way.how},
                     {"mb", peak / 1e6},
                     {"of_kept", peak / kept_peak}});
    }
    report(world,
           layout == GroupLayout::flat ? "16 Linear(512), flat, Adam" : "16 Linear(512), per parameter, Adam",
           jobs, 10, 5);
  }
}

}  // namespace

int main(int argc, char** argv) {
  int ranks = 2;
  std::vector<std::string> only{"mlp", "transformer", "groups", "wrapping", "one_group", "memory", "offload"};
  CLI::App app("Training steps of sharded models");
  app.add_option("--ranks", ranks, "how many")->check(CLI::PositiveNumber);
  app.add_option("--only", only, "what to run")->delimiter(',')->check(CLI::IsMember(only));
  CLI11_PARSE(app, argc, argv);
  const std::set<std::string> parts(only.begin(), only.end());
  run_ranks(ranks, [&](World& world) {
    if (parts.contains("mlp")) bench_mlp(world);
    if (parts.contains("transformer")) {
      bench_transformer(world);
      bench_gpt(world);
    }
    if (parts.contains("groups")) bench_groups(world);
    if (parts.contains("wrapping")) bench_wrapping(world);
    if (parts.contains("one_group")) bench_one_group(world);
    if (parts.contains("memory")) bench_memory(world);
    if (parts.contains("offload")) bench_offload(world);
  });
}
