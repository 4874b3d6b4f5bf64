#include "tools/bench.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>

#include "collectives/world.h"
#include "nn/gpt.h"
#include "nn/optimizer.h"
#include "runtime/backend.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/shown.h"
#include "runtime/timeline.h"
#include "shard/fully_shard.h"
#include "tools/among_ranks.h"
#include "tools/evaluate.h"
#include "tools/forecast.h"
#include "tools/output.h"
#include "tools/sharding.h"
#include "tools/trace.h"

namespace sherd::tools {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

nn::GptOptions gpt_options(const BenchOptions& o) {
  nn::GptOptions sizes = model_options(o.sizes);
  sizes.vocab = o.vocab;
  return sizes;
}

void check_options(const BenchOptions& o) {
  validate(o.sizes);
  check<ValueError>(o.steps >= 1 && o.steps <= 1 << 20, "--steps {}: takes values from 1 to {}", o.steps,
                    1 << 20);
  check<ValueError>(o.warmup >= 0 && o.warmup <= 1 << 20, "--warmup {}: takes values from 0 to {}", o.warmup,
                    1 << 20);
  check<ValueError>(o.vocab >= 1 && o.vocab <= 1 << 24, "--vocab {}: takes values from 1 to {}", o.vocab,
                    1 << 24);
  check<ValueError>(o.peak_tflops >= 0 && o.peak_tflops < std::numeric_limits<double>::infinity(),
                    "--peak-tflops {}: takes a number above 0, or 0 for what is known", o.peak_tflops);
  const Device device = device_named(o.sizes.device);
  backend(device.type).synchronize(device);  // says so where there is none
  check_fits(training_needs(o.sizes), o.sizes, memory_of_machine());
}

/// One rank's model and data.
class Trained {
 public:
  Trained(const BenchOptions& options, const World& world)
      : options_(options),
        device_(device_named(options.sizes.device)),
        model_(seeded(options, device_)),
        replicas_(shard_model(model_, options.sizes, world)),
        optimizer_(model_.parameters(), {.lr = 1e-4, .weight_decay = 0.1}) {
    const std::int64_t rows = options.sizes.batch / world.size();
    const std::int64_t most =
        options.sizes.micro_batch > 0 ? std::min(options.sizes.micro_batch, rows) : rows;
    manual_seed(derived_seed(options.sizes.seed, static_cast<std::uint64_t>(world.rank())));
    for (std::int64_t done = 0; done < rows; done += most) {
      const Shape shape{std::min(most, rows - done), options.sizes.context};
      parts_.push_back({randint(0, options.vocab, shape, {i64, device_}),
                        randint(0, options.vocab, shape, {i64, device_}),
                        static_cast<double>(shape[0]) / static_cast<double>(rows)});
    }
  }

  void step() {
    const TimelineSlice slice("step", "step");
    for (const Part& part : parts_) {
      Tensor logits = flatten(model_(part.tokens), 0, 1);
      const Tensor loss = training_loss(std::exchange(logits, {}), flatten(part.targets), part.share);
      (part.share < 1 ? mul(loss, part.share) : loss).backward();
    }
    optimizer_.step_clipped(shard::grad_norm(model_.parameters()), 1.0);
    optimizer_.zero_grad();
  }
  nn::Gpt& model() { return model_; }
  Device device() const { return device_; }

 private:
  struct Part {
    Tensor tokens, targets;
    double share;  ///< of the rank's rows
  };
  static nn::Gpt seeded(const BenchOptions& options, Device device) {
    manual_seed(options.sizes.seed);
    nn::Gpt model(gpt_options(options));
    model.to(device);
    return model;
  }

  const BenchOptions& options_;
  Device device_;
  nn::Gpt model_;
  std::unique_ptr<shard::DataParallel> replicas_;
  nn::AdamW optimizer_;
  std::vector<Part> parts_;
};

/// TFLOP/s of this rank's products, while all ranks run them: the best of some.
double measured_tflops(const Group& group, DType dtype) {
  constexpr std::int64_t n = 1024;
  const NoGrad guard;
  const Tensor a = randn({n, n}, {dtype}), b = randn({n, n}, {dtype});
  group.barrier({.label = "peak"});
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 10; ++i) {
    const Clock::time_point start = Clock::now();
    matmul(a, b);
    best = std::min(best, seconds_since(start));
  }
  return 2e-12 * n * n * n / best;
}

double sum_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v;
  return sum;
}

void find_peak(BenchReport& report, const Group& group, Device device) {
  const DType dtype = dtype_named(report.options.sizes.param_dtype);
  if (report.options.peak_tflops > 0) {
    report.peak_tflops = report.options.peak_tflops;
    report.peak_source = "given";
  } else if (device.is_cpu()) {
    report.peak_tflops = sum_of(everyones(group, measured_tflops(group, dtype)));
    report.peak_source = fmt::format("measured: products of 1024 x 1024 in {}", name_of(dtype));
  } else if (const std::optional<double> one = listed_tflops(report.product, dtype)) {
    report.peak_tflops = *one * group.size();
    report.peak_source = fmt::format("{} products of {}, dense", name_of(dtype), report.product);
  } else {
    report.peak_source = fmt::format("no peak of '{}' for {} products is listed; give --peak-tflops",
                                     report.product, name_of(dtype));
  }
}

void time_steps(BenchReport& report, Trained& trained, const Group& group) {
  const BenchOptions& o = report.options;
  const Device device = trained.device();
  Backend& on = backend(device.type);
  on.synchronize(device);
  group.barrier({.label = "start"});
  Context::current().memory().reset_peak(device.type);
  std::vector<std::unique_ptr<DeviceMark>> marks;
  const Clock::time_point start = Clock::now();
  marks.push_back(on.mark(device));
  for (std::int64_t i = 0; i < o.steps; ++i) {
    trained.step();
    marks.push_back(on.mark(device));
  }
  on.synchronize(device);
  const double seconds = seconds_since(start);
  std::vector<double> times;
  for (std::size_t i = 1; i < marks.size(); ++i)
    times.push_back(1e3 * marks[i]->seconds_since(*marks[i - 1]));
  std::ranges::sort(times);
  report.step_ms = times[times.size() / 2];
  report.fastest_ms = times.front();
  report.slowest_ms = times.back();
  const std::vector<double> all = everyones(group, seconds);
  report.tokens_per_s =
      static_cast<double>(o.steps * o.sizes.batch * o.sizes.context) / *std::ranges::max_element(all);
  const auto peak = static_cast<double>(Context::current().memory().peak(device.type));
  report.peak_memory = std::ranges::max(everyones(group, peak));
  report.held_between_steps = Context::current().memory().held(device.type).text();
}

BenchReport measure(const BenchOptions& options, const World& world, FileSystem& files) {
  BenchReport report{.options = options};
  Trained trained(options, world);
  report.product = backend(trained.device().type).product(trained.device());
  nn::GptOptions sizes = gpt_options(options);
  sizes.tensor.device = Device::meta();
  report.parameters = nn::Gpt(sizes).parameter_count();
  for (std::int64_t i = 0; i < options.warmup; ++i) trained.step();
  std::optional<Trace> trace;
  if (!options.trace.empty()) {
    trace.emplace(options.trace, files, world.group(), trained.device());
    trace->watch(trained.model());
  }
  time_steps(report, trained, world.group());
  if (trace) trace->finish();
  report.model_tflops = 1e-12 * report.tokens_per_s * flop_per_token(gpt_options(options));
  find_peak(report, world.group(), trained.device());
  return report;
}

/// The figures that two reports are compared by.
struct Figure {
  std::string_view name;
  double value;
};
std::vector<Figure> figures(const BenchReport& r) {
  return {{"tokens_per_s", r.tokens_per_s},
          {"step_ms", r.step_ms},
          {"model_tflops", r.model_tflops},
          {"peak_memory", r.peak_memory}};
}

std::string percent_text(double part) { return fmt::format("{:.1f} %", 100 * part); }

/// What is parsed takes a multiple in memory.
constexpr std::uint64_t most_report_bytes = std::uint64_t{1} << 20;

json report_from(const std::string& text) {
  // Deeper than any report is; what is written out of one goes down as deep.
  static constexpr int most_depth = 8;
  const auto shallow = [](int depth, json::parse_event_t, const json&) {
    check<ValueError>(depth <= most_depth,
                      "--against: the file is nested deeper than {} levels; give a report that sherd bench "
                      "wrote with --out",
                      most_depth);
    return true;
  };
  json report = json::parse(text, shallow, false);
  check<ValueError>(report.is_object() && report.contains("settings") && report["settings"].is_object() &&
                        report.contains("figures") && report["figures"].is_object(),
                    "--against: the file is no report of sherd bench; write one with --out");
  return report;
}

}  // namespace

bool is_benched(const Setting& setting) {
  static const std::set<std::string_view> names = {
      "batch", "micro-batch", "layers", "heads",       "width",        "context", "dropout", "seed",
      "ranks", "strategy",    "layout", "param-dtype", "reduce-dtype", "reshard", "device"};
  return names.contains(setting.name);
}

double flop_per_token(const nn::GptOptions& o) {
  const auto layers = static_cast<double>(o.layers), width = static_cast<double>(o.width);
  const double weights = width * (12 * layers * width + static_cast<double>(o.vocab));
  return 6 * weights + 12 * layers * width * static_cast<double>(o.context);
}

std::optional<double> listed_tflops(std::string_view product, DType dtype) {
  struct Gpu {
    std::string_view name;
    double half, single;  ///< f32 without TF32
  };
  // By the makers' data sheets, without sparsity; the first name that the product contains.
  constexpr Gpu gpus[] = {{"H200", 989.4, 66.9},
                          {"H100 PCIe", 756.4, 51.2},
                          {"H100 NVL", 835.5, 60.3},
                          {"H100", 989.4, 66.9},
                          {"A100", 311.8, 19.5}};
  for (const Gpu& gpu : gpus)
    if (product.find(gpu.name) != std::string_view::npos) return dtype == DType::f32 ? gpu.single : gpu.half;
  return {};
}

std::optional<double> BenchReport::mfu() const {
  if (!peak_tflops) return {};
  return model_tflops / *peak_tflops;
}

json BenchReport::settings() const {
  json all = json::object();
  visit_settings(options.sizes, [&](const Setting& s, const auto& value) {
    if (is_benched(s)) all[s.name == "param-dtype" ? "dtype" : std::string(s.name)] = value;
  });
  all["vocab"] = options.vocab;
  all["product"] = product;
  return all;
}

std::optional<BenchReport> run_bench(const BenchOptions& asked, FileSystem& files) {
  BenchOptions options = asked;
  if (options.sizes.device == "cuda" && !options.sizes.given.contains("param-dtype"))
    options.sizes.param_dtype = "bf16";
  check_ranges(options.sizes);
  if (options.sizes.threads > 0) Context::current().set_threads(options.sizes.threads);
  std::optional<BenchReport> result;
  run_ranks(ranks_to_run(options.sizes), [&](World& world) {
    BenchOptions mine = options;
    mine.sizes.ranks = world.size();
    check_options(mine);
    BenchReport report = measure(mine, world, files);
    if (world.rank() == 0) result = std::move(report);
  });
  return result;
}

std::string text_of(const BenchReport& r) {
  const TrainOptions& o = r.options.sizes;
  std::string text = fmt::format(
      "gpt: {} parameters, {} layers, {} heads, width {}, context {}, vocab {}; batch {}, {}, {}{}, {} "
      "rank{}\n",
      r.parameters, o.layers, o.heads, o.width, o.context, r.options.vocab, o.batch, o.param_dtype, o.device,
      r.product.empty() ? "" : " (" + r.product + ")", o.ranks, o.ranks == 1 ? "" : "s");
  text += fmt::format("step    {:.3f} ms, the median of {} ({:.3f} to {:.3f})\n", r.step_ms, r.options.steps,
                      r.fastest_ms, r.slowest_ms);
  text += fmt::format("speed   {:.0f} tokens/s, {:.4g} TFLOP/s\n", r.tokens_per_s, r.model_tflops);
  if (const std::optional<double> mfu = r.mfu())
    text +=
        fmt::format("mfu     {} of {:.4g} TFLOP/s ({})\n", percent_text(*mfu), *r.peak_tflops, r.peak_source);
  else
    text += fmt::format("mfu     none: {}\n", r.peak_source);
  text += fmt::format("memory  {} at most in tensors of a rank; between steps {}\n",
                      bytes_text(static_cast<std::int64_t>(r.peak_memory)), r.held_between_steps);
  return text;
}

std::string comparison(const BenchReport& report, const std::string& earlier) {
  const json before = report_from(earlier);
  std::string text;
  const json settings = report.settings();
  for (const auto& [name, value] : settings.items()) {
    const json old = before["settings"].value(name, json());
    if (old != value)
      text += fmt::format("against another {}: {} now, {} then\n", name, value.dump(), one_line(old.dump()));
  }
  for (const Figure& figure : figures(report)) {
    const json& old = before["figures"].value(figure.name, json());
    check<ValueError>(old.is_number() && old.get<double>() > 0,
                      "--against: the report lacks the figure '{}'; write one with --out", figure.name);
    text += fmt::format("against {:<13} {:.3f} ({:.6g} now, {:.6g} then)\n", figure.name,
                        figure.value / old.get<double>(), figure.value, old.get<double>());
  }
  return text;
}

std::string json_text(const BenchReport& r) {
  json all = {{"settings", r.settings()},     {"steps", r.options.steps},   {"warmup", r.options.warmup},
              {"parameters", r.parameters},   {"fastest_ms", r.fastest_ms}, {"slowest_ms", r.slowest_ms},
              {"peak_source", r.peak_source}, {"figures", json::object()}};
  for (const Figure& figure : figures(r)) all["figures"][std::string(figure.name)] = figure.value;
  if (r.peak_tflops) all["peak_tflops"] = *r.peak_tflops;
  if (r.mfu()) all["mfu"] = *r.mfu();
  return all.dump(2) + "\n";
}

std::string bench(const BenchOptions& options, FileSystem& files) {
  const Output out{"--out", options.out, {options.against, options.trace}},
      trace{"--trace", options.trace, {options.against, options.out}};
  for (const Output* output : {&out, &trace})
    if (!output->path.empty()) check_output(*output, files);
  const std::string earlier = options.against.empty() ? "" : files.read(options.against, most_report_bytes);
  if (!options.against.empty()) report_from(earlier);
  const std::optional<BenchReport> report = run_bench(options, files);
  if (!report) return {};
  if (!options.out.empty()) write_output(out, json_text(*report), files);
  return text_of(*report) + (options.against.empty() ? "" : comparison(*report, earlier));
}

}  // namespace sherd::tools
