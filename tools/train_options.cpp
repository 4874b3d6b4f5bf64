#include "tools/train_options.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "collectives/world.h"
#include "nn/pretrained.h"
#include "runtime/backend.h"
#include "runtime/error.h"
#include "runtime/shown.h"
#include "tools/number.h"

namespace sherd::tools {

using nlohmann::json;

namespace {

void check_range(const Setting& s, const auto& value) {
  const auto v = static_cast<double>(value);
  check<ValueError>(v >= s.min && v <= s.max, "--{} {}: takes values from {} to {}; for example --{} {}",
                    s.name, value, s.min, s.max, s.name, s.example);
}

void check_range(const Setting& s, const std::string& value) {
  bool known = s.words.empty();
  for (std::string_view rest = s.words; !known && !rest.empty();) {
    const std::string_view word = rest.substr(0, rest.find('|'));
    known = word == value;
    rest.remove_prefix(std::min(rest.size(), word.size() + 1));
  }
  check<ValueError>(known, "--{} {}: takes {}; for example --{} {}", s.name, shown(value), s.words, s.name,
                    s.example);
}

/// What only makes sense together.
void check_ranks(const TrainOptions& o) {
  const std::optional<int> kept = reshard_of(o).ranks();
  if (o.strategy == "data_parallel") {
    for (const std::string* dtype : {&o.param_dtype, &o.reduce_dtype})
      check<ValueError>(*dtype == "f32",
                        "--strategy data_parallel: computes and averages in f32, not in {}; take no_shard",
                        *dtype);
  }
  check<ValueError>(o.strategy == "full_shard" || (o.reshard == "true" && !o.given.contains("reshard")),
                    "--reshard {}: is of --strategy full_shard; {} has its own rule, leave --reshard out",
                    o.reshard, o.strategy);
  if (o.ranks == 0) return;  // not known yet
  check<ValueError>(o.batch % o.ranks == 0, "--ranks {}: does not divide --batch {}", o.ranks, o.batch);
  check<ValueError>(!kept || o.ranks % *kept == 0, "--reshard {}: does not divide --ranks {}", o.reshard,
                    o.ranks);
}

/// Of a run from a model's folder.
void check_tuning(const TrainOptions& o) {
  check<ValueError>(o.context >= 2, "--context {}: is at least 2 tokens", o.context);
  check<ValueError>(o.lora_dropout < 1,
                    "--lora-dropout {}: would drop everything; take a probability below 1", o.lora_dropout);
  for (const char* name : {"lora-alpha", "lora-dropout", "lora-layers", "base-dtype"})
    check<ValueError>(o.lora > 0 || !o.given.contains(name),
                      "--{}: is of adapters; give their rank with --lora", name);
  check<ValueError>(o.lora == 0 || o.layout == "per-parameter" || o.base_dtype == "f32",
                    "--layout {}: has one dtype, and adapters are f32 over weights in {}; take --layout "
                    "per-parameter or --base-dtype f32",
                    o.layout, o.base_dtype);
  for (const char* name : {"layers", "heads", "width", "dropout"})
    check<ValueError>(!o.given.contains(name), "--{}: the model in '{}' has its own; leave it out", name,
                      shown(o.model, 300));
}

}  // namespace

void check_ranges(const TrainOptions& o) {
  visit_settings(o, [](const Setting& s, const auto& value) { check_range(s, value); });
  check<ValueError>(o.threads >= 0 && o.threads <= 4096,
                    "--threads {}: takes a number from 1 to 4096, or 0 for all cores", o.threads);
  reshard_of(o);
  for (const char* name : {"epochs", "lora", "lora-alpha", "lora-dropout", "lora-layers", "base-dtype"})
    check<ValueError>(!o.model.empty() || o.resume || !o.given.contains(name),
                      "--{}: is of a run from a model's folder; name one with --model", name);
}

void validate(const TrainOptions& o) {
  check_ranges(o);
  if (!o.model.empty()) check_tuning(o);
  check<ValueError>(!o.model.empty() || o.width % o.heads == 0, "--heads {}: does not divide --width {}",
                    o.heads, o.width);
  check<ValueError>(o.micro_batch <= o.batch, "--micro-batch {}: is more than --batch {}", o.micro_batch,
                    o.batch);
  check<ValueError>(o.dropout < 1, "--dropout {}: would drop everything; take a probability below 1",
                    o.dropout);
  check<ValueError>(o.beta2 < 1, "--beta2 {}: must be below 1", o.beta2);
  check<ValueError>(o.lr > 0, "--lr {}: must be above 0", o.lr);
  check<ValueError>(o.min_lr <= o.lr, "--min-lr {}: is above --lr {}", o.min_lr, o.lr);
  check_ranks(o);
}

TrainOptions with_tuning_defaults(TrainOptions o, FileSystem& files) {
  std::int64_t positions = 0;
  const nn::PretrainedOptions model = nn::pretrained_options(o.model, files);
  if (const auto* gpt = std::get_if<nn::GptOptions>(&model)) {
    o.layers = gpt->layers, o.heads = gpt->heads, o.width = gpt->width, positions = gpt->context;
  } else {
    const auto& m = std::get<nn::LlamaOptions>(model);
    o.layers = m.num_hidden_layers, o.heads = m.num_attention_heads, o.width = m.hidden_size;
    positions = m.context();
  }
  const auto fallback = [&](const char* name, auto& value, auto standard) {
    if (!o.given.contains(name)) value = standard;
  };
  fallback("lr", o.lr, o.lora > 0 ? 2e-4 : 2e-5);
  fallback("min-lr", o.min_lr, 0.0);
  fallback("beta2", o.beta2, 0.999);
  fallback("weight-decay", o.weight_decay, 0.0);
  fallback("context", o.context, std::min<std::int64_t>(1024, positions));
  fallback(
      "batch", o.batch,
      std::max<std::int64_t>(8 / std::max<std::int64_t>(o.ranks, 1), 1) * std::max<std::int64_t>(o.ranks, 1));
  fallback("micro-batch", o.micro_batch, std::int64_t{1});
  fallback("lora-alpha", o.lora_alpha, 2.0 * static_cast<double>(o.lora));
  if (o.lora_alpha == 0) o.lora_alpha = 2.0 * static_cast<double>(o.lora);
  check<ValueError>(o.context <= positions, "--context {}: the model in '{}' has {} positions", o.context,
                    shown(o.model, 300), positions);
  return o;
}

TrainOptions with_steps(TrainOptions o, std::int64_t rows) {
  if (!o.given.contains("batch")) o.batch = std::max(std::min(o.batch, rows) / o.ranks * o.ranks, o.ranks);
  check<ValueError>(
      rows >= o.batch,
      "--batch {}: the data makes {} rows of up to {} tokens; give a smaller batch, fewer ranks, a "
      "shorter --context or more data",
      o.batch, rows, o.context);
  if (!o.given.contains("steps")) o.steps = o.epochs * (rows / o.batch);
  if (!o.given.contains("warmup")) o.warmup = std::max<std::int64_t>(o.steps * 3 / 100, 1);
  if (!o.given.contains("eval-every")) o.eval_every = std::max<std::int64_t>(o.steps / 10, 1);
  return o;
}

json to_json(const TrainOptions& options) {
  json settings = json::object();
  visit_settings(options, [&](const Setting& s, const auto& value) {
    if (s.on_resume != OnResume::free) settings[std::string(s.name)] = value;
  });
  return settings;
}

TrainOptions settings_from(const json& settings) {
  TrainOptions options;
  visit_settings(options, [&](const Setting& s, auto& value) {
    const std::string name(s.name);
    if (s.on_resume != OnResume::free && (!s.late || settings.contains(name)))
      settings.at(name).get_to(value);
  });
  return options;
}

int ranks_to_run(const TrainOptions& o) {
  const int launched = launched_ranks();
  if (launched == 1) return static_cast<int>(o.ranks);
  check<ValueError>(
      !o.given.contains("ranks") || o.ranks == 0 || o.ranks == launched,
      "--ranks {}: the launcher started {} processes, which are the ranks; leave --ranks out, or "
      "start {}",
      o.ranks, launched, o.ranks);
  return 0;
}

nn::GptOptions model_options(const TrainOptions& o) {
  return {.layers = o.layers,
          .heads = o.heads,
          .width = o.width,
          .context = o.context,
          .vocab = 256,
          .dropout = o.dropout};
}

shard::ReshardAfterForward reshard_of(const TrainOptions& o) {
  if (o.reshard == "true" || o.reshard == "false") return o.reshard == "true";
  int ranks = 0;
  try {
    ranks = number_from<int>("--reshard", o.reshard);
  } catch (const ValueError&) {
    // refused below, with what else it takes
  }
  check<ValueError>(ranks > 0,
                    "--reshard {}: takes true, false or a number of ranks from 1; for example --reshard 2",
                    shown(o.reshard));
  return ranks;
}

Device device_named(std::string_view name) {
  if (name != "cuda") return Device::cpu();
  const World* world = World::current_or_null();
  const int rank = world != nullptr ? world->local_rank() : 0;
  return Device::cuda(rank % std::max(1, gpu_count()));
}

DType dtype_named(std::string_view name) { return name == "bf16" ? bf16 : name == "f16" ? f16 : f32; }

TrainOptions resumed(const TrainOptions& asked, const TrainOptions& saved, std::int64_t step,
                     std::vector<Change>& changes) {
  TrainOptions result = asked;
  const json before = to_json(saved);
  visit_settings(result, [&](const Setting& s, auto& value) {
    if (s.on_resume == OnResume::free) return;
    const json& old = before.at(std::string(s.name));
    // What the run's strategy had beside it is nothing to another one, which `validate` would refuse it with.
    const bool moot = s.name == "reshard" && result.strategy != "full_shard";
    if (!asked.given.contains(s.name) && !moot) old.get_to(value);
    if (json(value) == old) return;
    check<ValueError>(s.on_resume == OnResume::recorded,
                      "--{} {}: the run was started with {}; leave the flag out to go on, or start another "
                      "run without --resume",
                      s.name, value, old.dump());
    changes.push_back({step, std::string(s.name), old.dump(), json(value).dump()});
  });
  return result;
}

}  // namespace sherd::tools
