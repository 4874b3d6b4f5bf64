#include "tools/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "runtime/error.h"
#include "runtime/io/checksum.h"
#include "runtime/io/durable.h"
#include "runtime/shown.h"
#include "shard/checkpoint.h"
#include "shard/saved_state.h"
#include "tools/tuned_model.h"

namespace sherd::tools {
namespace {

using nlohmann::json;
using Path = FileSystem::Path;

constexpr std::string_view prefix = "step-";
constexpr int format_version = 1;
// Of config.json, where the checksum of the whole text stands in it.
constexpr std::string_view checksum_key = "checksum", checksum_marker = "\"checksum\": \"";
// A run of very many files to train on still fits; what is parsed takes a multiple in memory.
constexpr std::size_t most_config_bytes = std::size_t{1} << 21, most_config_depth = 8;

/// The step in a name of "step-" and digits; the highest where it has none that large.
std::optional<std::int64_t> step_of(std::string_view name) {
  if (!name.starts_with(prefix)) return {};
  name.remove_prefix(prefix.size());
  if (name.empty() || name.find_first_not_of("0123456789") != std::string_view::npos) return {};
  std::int64_t step = 0;
  const auto error = std::from_chars(name.data(), name.data() + name.size(), step).ec;
  return error == std::errc() ? step : std::numeric_limits<std::int64_t>::max();
}

/// As this program writes it.
bool is_checkpoint_name(std::string_view name) {
  const std::optional<std::int64_t> step = step_of(name);
  return step && name.substr(prefix.size()) == std::to_string(*step);
}

std::vector<std::string> names_in(const Path& run, FileSystem& files) {
  return files.exists(run) ? files.list(run) : std::vector<std::string>();
}

/// Why there is no checkpoint of that name; empty where there may be one.
std::string flaw_of(const Path& run, const std::string& name, FileSystem& files) {
  if (!is_checkpoint_name(name)) return "is not named as a checkpoint is, by a step without leading zeros";
  const std::filesystem::file_type type = files.type(run / name);
  if (type != std::filesystem::file_type::directory)
    return fmt::format("is {}, a checkpoint is a folder", sherd::name_of(type));
  return files.exists(run / name / "config.json") ? "" : "has no config.json";
}

json to_json(const RunConfig& c) {
  json changes = json::array();
  for (const Change& change : c.changes) {
    changes.push_back(
        {{"step", change.step}, {"setting", change.name}, {"from", change.from}, {"to", change.to}});
  }
  json config = {{"format", "sherd-checkpoint"},
                 {"version", format_version},
                 {"step", c.step},
                 {"loss", c.loss},
                 {"settings", to_json(c.options)},
                 {"data", {{"paths", c.options.data}, {"digest", c.data_digest}}},
                 {"generator", {{"seed", c.generator.seed}, {"offset", c.generator.offset}}},
                 {"changes", changes},
                 {"saved_beside", c.saved_beside},
                 {checksum_key, std::string(checksum_digits, '0')}};
  if (!c.base_digest.empty()) config["base_digest"] = c.base_digest;
  if (c.loss_scale) config["loss_scale"] = {{"scale", c.loss_scale->scale}, {"steps", c.loss_scale->steps}};
  if (c.best) config["best"] = {{"step", c.best->step}, {"val_loss", c.best->loss}};
  return config;
}

RunConfig config_from(const json& from) {
  check<ValueError>(
      from.value("format", "") == "sherd-checkpoint" && from.value("version", 0) == format_version,
      "format '{}' and version {}; this program reads 'sherd-checkpoint' and {}", from.value("format", ""),
      from.value("version", 0), format_version);
  RunConfig c;
  c.options = settings_from(from.at("settings"));
  from.at("step").get_to(c.step);
  from.at("loss").get_to(c.loss);
  from.at("data").at("paths").get_to(c.options.data);
  from.at("data").at("digest").get_to(c.data_digest);
  from.at("generator").at("seed").get_to(c.generator.seed);
  from.at("generator").at("offset").get_to(c.generator.offset);
  if (c.options.lora > 0) from.at("base_digest").get_to(c.base_digest);
  if (from.contains("loss_scale"))
    c.loss_scale = {from["loss_scale"].at("scale"), from["loss_scale"].at("steps")};
  if (from.contains("best")) c.best = {{from["best"].at("step"), from["best"].at("val_loss")}};
  for (const json& change : from.at("changes")) {
    c.changes.push_back({change.at("step"), change.at("setting"), change.at("from"), change.at("to")});
  }
  if (from.contains("saved_beside")) from["saved_beside"].get_to(c.saved_beside);
  validate(c.options);
  check<ValueError>(c.step >= 0, "step {} is negative", c.step);
  check<ValueError>(
      !c.loss_scale || (c.loss_scale->scale > 0 && c.loss_scale->scale <= std::numeric_limits<float>::max() &&
                        c.loss_scale->steps >= 0),
      "a loss scale of {} for {} steps; it is above 0 and finite in f32, for 0 steps or more",
      c.loss_scale ? c.loss_scale->scale : 0, c.loss_scale ? c.loss_scale->steps : 0);
  return c;
}

json shallow(const std::string& text) {
  return json::parse(text, [](int depth, json::parse_event_t, const json&) {
    check<ValueError>(depth <= static_cast<int>(most_config_depth), "nested deeper than {} levels",
                      most_config_depth);
    return true;
  });
}

/// Of parameters, by their names.
using Shapes = std::map<std::string, std::vector<std::int64_t>>;

/// Of what its checkpoints have.
Shapes shapes_in(const nn::Module& model, shard::Frozen frozen) {
  Shapes shapes;
  for (const nn::NamedParameter& p : model.named_parameters())
    if (frozen == shard::Frozen::saved || p.parameter.requires_grad())
      shapes[p.name] = {p.parameter.shape().begin(), p.parameter.shape().end()};
  return shapes;
}

/// The model beneath adapters is read from its own folder.
shard::Frozen frozen_of(const TrainOptions& options) {
  return options.lora > 0 ? shard::Frozen::left_out : shard::Frozen::saved;
}

/// Of such a model, without building it.
Shapes shapes_of(const TrainOptions& options, FileSystem& files) {
  if (!options.model.empty())
    return shapes_in(TunedModel::on_meta(options, files).module(), frozen_of(options));
  nn::GptOptions sizes = model_options(options);
  sizes.tensor.device = Device::meta();
  return shapes_in(nn::Gpt(sizes), shard::Frozen::saved);
}

/// Runs `read` on one file and puts the file's name before what it complains about.
void reading(const Path& file, const std::function<void()>& read) {
  try {
    read();
  } catch (const FileError&) {
    throw;  // names it already
  } catch (const CollectiveError&) {
    throw;  // another rank's complaint
  } catch (const json::exception& error) {
    fail<ValueError>("checkpoint: '{}': {}", file.string(), error.what());
  } catch (const Error& error) {
    fail<ValueError>("checkpoint: '{}': {}", file.string(), error.what());
  }
}

/// How many tensors a file has.
struct Counts {
  std::size_t least, most;
};

/// Weights have every parameter, and what is tied perhaps twice.
Counts weight_counts(const Shapes& shapes) { return {shapes.size(), shapes.size() + 1}; }
/// AdamW's state has up to three tensors a parameter, and its options for each of its two groups.
Counts moment_counts(const Shapes& shapes) {
  const nn::AdamW one(std::vector{nn::Parameter(zeros({}))});
  return {0, 3 * shapes.size() + 2 * one.option_names().size()};
}

/// Every tensor has the shape of a parameter, of its own where it has a parameter's name, or is a number.
void check_shapes(const shard::SavedState& state, const Shapes& shapes, const Counts& counts) {
  const std::size_t count = state.tensors().size();
  check<ValueError>(count >= counts.least && count <= counts.most,
                    "holds {} tensors, of the model in config.json there are {} to {}", count, counts.least,
                    counts.most);
  std::set<std::vector<std::int64_t>> known = {{}};
  for (const auto& [name, shape] : shapes) known.insert(shape);
  for (const shard::SavedTensor& tensor : state.tensors()) {
    const std::vector<std::int64_t> shape(tensor.shape.begin(), tensor.shape.end());
    const auto its = shapes.find(std::string(tensor.name));
    check<ValueError>(its == shapes.end() ? known.contains(shape) : its->second == shape,
                      "'{}' has the shape [{}], which does not belong to the model in config.json",
                      shown(tensor.name), fmt::join(shape, ", "));
  }
}

/// What `RunConfig` has of the states in a folder.
std::map<std::string, std::string> signatures_in(const Path& folder, FileSystem& files) {
  std::map<std::string, std::string> found;
  for (const std::string_view what : {"model", "optimizer"}) {
    const shard::Signature its = shard::signature_of(folder, what, files);
    found[its.file] = its.checksum;
  }
  return found;
}

/// The files of a checkpoint, open one after the other, before anything of them is used.
class Inspection {
 public:
  Inspection(Path checkpoint, const TrainOptions& options, FileSystem& files)
      : checkpoint_(std::move(checkpoint)), options_(options), files_(files) {
    const Path config = checkpoint_ / "config.json";
    reading(config, [&] {
      const std::string text = files_.read(config, most_config_bytes);
      note(config, seal_of(text, checksum_marker) != Seal::none);
      saved_beside_ = parse_config(text).saved_beside;
    });
  }

  /// A model is made for its shapes only where the file has tensors for its layers.
  void check_weights() {
    look("model", [&](const shard::SavedState& state) {
      check<ValueError>(
          options_.lora > 0 || state.tensors().size() >= static_cast<std::size_t>(options_.layers),
          "holds {} tensors, the model in config.json has {} layers", state.tensors().size(),
          options_.layers);
      shapes_ = shapes_of(options_, files_);
      check_shapes(state, shapes_, weight_counts(shapes_));
    });
  }

  /// After the weights.
  void check_moments() {
    look("optimizer",
         [&](const shard::SavedState& state) { check_shapes(state, shapes_, moment_counts(shapes_)); });
  }

 private:
  void look(std::string_view what, const std::function<void(const shard::SavedState&)>& inspect) {
    const shard::SavedState state(checkpoint_, what, files_);  // names the file that is wrong
    note(state.path(), state.has_checksums());
    reading(state.path(), [&] {
      check_save(state);
      inspect(state);
    });
  }

  /// It is what config.json was written beside.
  void check_save(const shard::SavedState& state) const {
    if (saved_beside_.empty() || !state.has_checksums()) return;
    const auto found = saved_beside_.find(state.path().filename().string());
    const std::string_view written = found == saved_beside_.end() ? std::string_view("none") : found->second;
    check<ValueError>(
        written == state.checksum(),
        "is of another save than config.json beside it: its checksum is {}, config.json has {}; take "
        "all files from one save",
        state.checksum(), shown(written));
  }

  /// In one folder all files have a checksum or, made elsewhere, none has. Else damage that hides a checksum
  /// would pass.
  void note(const Path& file, bool has_checksum) {
    (has_checksum ? sealed_ : bare_) = file;
    if (bare_.empty() || sealed_.empty()) return;
    reading(bare_, [&] {
      fail<ValueError>(
          "has no checksum, {} beside it has one: it is damaged, or changed by somebody who has to take "
          "it from all files of the checkpoint",
          sealed_.filename().string());
    });
  }

  Path checkpoint_;
  const TrainOptions& options_;
  FileSystem& files_;
  Shapes shapes_;
  std::map<std::string, std::string> saved_beside_;
  Path bare_, sealed_;  ///< files without and with a checksum
};

}  // namespace

std::string config_text(const RunConfig& config) {
  std::string text = to_json(config).dump(2, ' ', false, json::error_handler_t::replace) + "\n";
  check<ValueError>(
      text.size() <= most_config_bytes,
      "config.json: takes {} bytes, the limit is {}; name folders in --data and not their files", text.size(),
      most_config_bytes);
  seal(text, checksum_marker);
  return text;
}

RunConfig parse_config(const std::string& text) {
  const json config = shallow(text);
  check<ValueError>(!config.contains(checksum_key) || seal_of(text, checksum_marker) == Seal::whole,
                    "is damaged: it does not fit its checksum; whoever changes it on purpose has to take the "
                    "checksum from all "
                    "files of the checkpoint");
  return config_from(config);
}

Path checkpoint_path(const Path& run, std::int64_t step) { return run / fmt::format("{}{}", prefix, step); }

std::vector<std::int64_t> saved_steps(const Path& run, FileSystem& files) {
  std::vector<std::int64_t> steps;
  for (const std::string& name : names_in(run, files))
    if (is_checkpoint_name(name) && files.is_directory(run / name)) steps.push_back(*step_of(name));
  std::ranges::sort(steps);
  return steps;
}

bool has_checkpoint_name(std::string_view name) {
  return step_of(name.substr(0, name.find('.'))).has_value();
}

bool has_checkpoints(const Path& run, FileSystem& files) {
  return std::ranges::any_of(names_in(run, files),
                             [](const std::string& name) { return step_of(name).has_value(); });
}

std::optional<std::int64_t> newest_checkpoint(const Path& run, FileSystem& files) {
  std::optional<std::int64_t> newest;
  std::string looks_newer, flaw;
  for (const std::string& name : names_in(run, files)) {
    const std::optional<std::int64_t> step = step_of(name);
    if (!step || step < newest) continue;
    const std::string its = flaw_of(run, name, files);
    if (!its.empty() && step == newest) continue;
    newest = step;
    looks_newer = name;
    flaw = its;
  }
  check<ValueError>(flaw.empty(), "checkpoint: '{}' {}; move it elsewhere, or mend it to go on from there",
                    shown((run / looks_newer).string(), 300), flaw);
  return newest;
}

void save_checkpoint(const Path& run, const RunConfig& config, nn::Module& model,
                     const nn::Optimizer& optimizer, const Group& ranks, FileSystem& files) {
  const Path checkpoint = checkpoint_path(run, config.step);
  const auto add_config = [&](DirectoryWriter& folder) {
    RunConfig recorded = config;
    recorded.saved_beside = signatures_in(PendingDirectory::partial_of(checkpoint), files);
    folder.add("config.json", [&](OutputFile& file) { file.write(config_text(recorded)); });
  };
  shard::save_checkpoint(model, optimizer, checkpoint, ranks,
                         {.also = add_config, .frozen = frozen_of(config.options), .files = files});
}

void remove_old(const Path& run, const RunConfig& config, FileSystem& files) {
  std::vector<std::int64_t> steps = saved_steps(run, files);
  const auto newest = std::min(steps.size(), static_cast<std::size_t>(config.options.keep));
  steps.resize(steps.size() - newest);
  for (const std::int64_t step : steps) {
    if (!config.best || config.best->step != step) remove_durably(checkpoint_path(run, step), files);
  }
}

RunConfig read_config(const Path& checkpoint, FileSystem& files) {
  const Path file = checkpoint / "config.json";
  RunConfig config;
  reading(file, [&] { config = parse_config(files.read(file, most_config_bytes)); });
  return config;
}

void check_weights(const Path& checkpoint, const TrainOptions& options, FileSystem& files) {
  Inspection(checkpoint, options, files).check_weights();
}

void check_states(const Path& checkpoint, const TrainOptions& options, FileSystem& files) {
  Inspection inspection(checkpoint, options, files);
  inspection.check_weights();
  inspection.check_moments();
}

void load_model(const Path& checkpoint, nn::Gpt& model, FileSystem& files) {
  shard::load_checkpoint(model, checkpoint, {}, files);
}

void load_states(const Path& checkpoint, const TrainOptions& options, nn::Module& model,
                 nn::Optimizer& optimizer, const Group& ranks, FileSystem& files) {
  shard::load_checkpoint(model, optimizer, checkpoint, ranks, {.frozen = frozen_of(options), .files = files});
}

void check_base(const RunConfig& run, const std::string& found) {
  check<ValueError>(found == run.base_digest,
                    "--model '{}': is not the model that the adapters are trained on: its digest is {}, the "
                    "run's {}; put that model back",
                    shown(run.options.model, 300), found, shown(run.base_digest));
}

}  // namespace sherd::tools
