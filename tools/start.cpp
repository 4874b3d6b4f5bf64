#include "tools/start.h"

#include <algorithm>

#include "runtime/backend.h"
#include "runtime/error.h"
#include "runtime/shown.h"
#include "tools/among_ranks.h"
#include "tools/default_text.h"
#include "tools/evaluate.h"
#include "tools/forecast.h"
#include "tools/generate.h"
#include "tools/output.h"
#include "tools/run_folder.h"
#include "tools/tuned_model.h"

namespace sherd::tools {
namespace {

using Path = FileSystem::Path;

/// What is no UTF-8 would be another path in config.json, and the run could not go on.
void check_recordable(std::string_view flag, const std::vector<std::string>& paths) {
  for (const std::string& path : paths)
    check<ValueError>(printable(path) == without_controls(path),
                      "{}: '{}' is not UTF-8, and is recorded in config.json, which is; rename it", flag,
                      printable(shown(path, 300)));
}

std::string whole_path(const std::string& path) {
  return std::filesystem::absolute(path).lexically_normal().string();
}

RunConfig fresh_config(const TrainOptions& asked, FileSystem& files) {
  RunConfig config{.options = asked};
  if (!asked.model.empty()) {
    check<ValueError>(!asked.data.empty(), "--data: name the files to tune the model on");
    check<FileError>(files.exists(Path(asked.model) / "config.json"),
                     "--model '{}': has no config.json; name the folder of a model of the Hub",
                     shown(asked.model, 300));
    config.options = with_tuning_defaults(asked, files);
    config.options.model = whole_path(asked.model);
  }
  if (config.options.data.empty()) config.options.data = default_text();
  if (config.options.device == "cuda" && !asked.given.contains("param-dtype"))
    config.options.param_dtype = "bf16";
  // The run may be resumed from another folder.
  for (std::string& path : config.options.data) path = whole_path(path);
  check_recordable("--data", config.options.data);
  check_recordable("--model", {config.options.model});
  return config;
}

RunConfig resumed_config(TrainOptions asked, const Path& checkpoint, FileSystem& files) {
  RunConfig config = read_config(checkpoint, files);
  if (!asked.model.empty()) asked.model = whole_path(asked.model);
  std::vector<std::string> data = asked.data.empty() ? config.options.data : asked.data;
  config.options = resumed(asked, config.options, config.step, config.changes);
  config.options.data = std::move(data);
  check_recordable("--data", config.options.data);
  check<ValueError>(config.options.steps >= config.step, "--steps {}: the run has done {} already",
                    config.options.steps, config.step);
  return config;
}

void check_length(std::span<const std::uint8_t> part, std::string_view name, std::int64_t context) {
  check<ValueError>(window_starts(part.size(), context) > 0,
                    "--context {}: the {} part of the data has {} bytes, at least {} are needed; give more "
                    "data or a shorter context",
                    context, name, part.size(), context + 1);
}

/// Who goes on beside one who begins would be in another run.
void check_alike(bool resume, const Group& group) {
  const std::vector<double> all = everyones(group, resume ? 1 : 0);
  const auto with = std::ranges::find(all, 1), without = std::ranges::find(all, 0);
  check<ValueError>(with == all.end() || without == all.end(),
                    "--resume: rank {} was started with it, rank {} without; start all ranks alike",
                    with - all.begin(), without - all.begin());
}

/// The part of all ranks that lies on this machine.
double share_of(const World& world) {
  return static_cast<double>(world.local_size()) / static_cast<double>(world.size());
}

/// What can be said of sizes before data or weights are read.
void check_sizes(const TrainOptions& options, const World& world, FileSystem& files) {
  validate(options);
  const Device device = device_named(options.device);
  backend(device.type).synchronize(device);  // says so where there is none
  check_fits(options.model.empty() ? training_needs(options) : tuning_needs(options, files), options,
             memory_of_machine(), share_of(world));
}

void check_trace(const TrainOptions& asked, const RunConfig& config, const Path& out, FileSystem& files) {
  if (asked.trace.empty()) return;
  check_output({"--trace", asked.trace, config.options.data, {out.string()}}, files);
  check<FileError>(!asked.out.empty() || !has_number_of_run(asked.trace),
                   "--trace: '{}' may be the folder of this run; name another", shown(asked.trace, 300));
}

/// A run that wrote into what it reads could not go on: the data would be another.
void check_apart(const RunConfig& config, const Path& out) {
  for (const std::string& data : config.options.data)
    check<ValueError>(
        !is_read_with(data, out),
        "--out '{}': is read with the data in '{}', and the run could not go on when it had changed that; "
        "name a folder elsewhere, or one whose name begins with a dot",
        shown(out.string(), 300), shown(data, 300));
}

/// A run that goes on for other epochs has other steps.
void count_epochs(RunConfig& config, std::int64_t rows) {
  TrainOptions& o = config.options;
  const std::int64_t steps = o.epochs * (rows / o.batch);
  check<ValueError>(steps >= config.step, "--epochs {}: are {} steps, the run has done {} already", o.epochs,
                    steps, config.step);
  if (steps != o.steps)
    config.changes.push_back({config.step, "steps", std::to_string(o.steps), std::to_string(steps)});
  o.steps = steps;
}

/// A tokenizer of another model makes tokens that this one has not.
void check_vocabulary(const Tokens& tokens, const TrainOptions& options, FileSystem& files) {
  const std::int64_t vocabulary = TunedModel::on_meta(options, files).vocabulary();
  for (const nn::Packing* packing : {&tokens.train, &tokens.validation}) {
    const std::int64_t largest = std::ranges::max(packing->text().tokens);
    check<ValueError>(largest < vocabulary,
                      "--model '{}': its tokenizer makes token {}, the model has {}; the tokenizer is of "
                      "another model",
                      shown(options.model, 300), largest, vocabulary);
  }
}

Start resumed_start(const TrainOptions& asked, FileSystem& files, SharedText& text, const World& world) {
  Start start{.out = resumed_folder(asked, files)};
  require_run_folder(start.out, files);
  start.lock = lock_run_folder(start.out, files);
  const Path checkpoint = checkpoint_path(start.out, newest_step(start.out, files));
  start.config = resumed_config(asked, checkpoint, files);
  check_sizes(start.config.options, world, files);
  check_trace(asked, start.config, start.out, files);
  check_base(start.config, text.base_digest(start.config.options, files));
  check_states(checkpoint, start.config.options, files);
  check<ValueError>(text.digest(start.config.options, files) == start.config.data_digest,
                    "--resume: the data is not what the run in '{}' was started with", start.out.string());
  if (!start.config.options.model.empty()) {
    const Tokens& tokens = text.kept_tokens(start.config, start.out, files);
    if (asked.given.contains("epochs") && !asked.given.contains("steps"))
      count_epochs(start.config, tokens.train.rows());
  }
  return start;
}

/// Every check of options and data comes before the first change on the disk.
Start new_start(const TrainOptions& asked, FileSystem& files, SharedText& text, const World& world) {
  Start start{.out = {}, .config = fresh_config(asked, files)};
  const bool tunes = !start.config.options.model.empty();
  check_sizes(start.config.options, world, files);
  const Path out = run_folder_to_make(asked);
  check_trace(asked, start.config, out, files);
  if (tunes) {
    const Tokens& tokens = text.new_tokens(start.config.options, files);
    start.config.options = with_steps(start.config.options, tokens.train.rows());
    validate(start.config.options);
    check_vocabulary(tokens, start.config.options, files);
  }
  start.config.data_digest = text.digest(start.config.options, files);
  start.config.base_digest = text.base_digest(start.config.options, files);
  check_apart(start.config, out);
  LockedFolder folder = create_run_folder(asked, files);
  start.out = std::move(folder.path);
  start.lock = std::move(folder.lock);
  if (tunes) save_tokens(text.new_tokens(start.config.options, files), start.out, files);
  return start;
}

}  // namespace

const Tokens& SharedText::new_tokens(const TrainOptions& options, FileSystem& files) {
  const std::scoped_lock lock(mutex_);
  if (!tokens_) tokens_ = make_tokens(options, files);
  return *tokens_;
}

const Tokens& SharedText::kept_tokens(const RunConfig& config, const FileSystem::Path& out,
                                      FileSystem& files) {
  const std::scoped_lock lock(mutex_);
  if (tokens_) return *tokens_;
  try {
    tokens_ = load_tokens(config.options, config.data_digest, out, files);
  } catch (const Error&) {  // lost or damaged: the data is what it was
    tokens_ = make_tokens(config.options, files);
    save_tokens(*tokens_, out, files);
  }
  return *tokens_;
}

const Tokens& SharedText::tokens(const RunConfig& config, const FileSystem::Path& out, FileSystem& files) {
  const std::scoped_lock lock(mutex_);
  if (!tokens_) tokens_ = load_tokens(config.options, config.data_digest, out, files);
  return *tokens_;
}

std::uint64_t SharedText::digest(const TrainOptions& options, FileSystem& files) {
  if (options.model.empty()) return get(options, files).digest;
  {
    const std::scoped_lock lock(mutex_);
    if (tokens_) return tokens_->digest;
  }
  return tokens_digest(options, files);
}

std::string SharedText::base_digest(const TrainOptions& options, FileSystem& files) {
  if (options.lora == 0) return {};
  const std::scoped_lock lock(mutex_);
  if (base_digest_.empty()) base_digest_ = nn::pretrained_digest(options.model, files);
  return base_digest_;
}

const Text& SharedText::get(const TrainOptions& options, FileSystem& files) {
  const std::scoped_lock lock(mutex_);
  if (!text_) {
    Text text = read_text(options.data, files);
    check_length(text.train, "training", options.context);
    check_length(text.validation, "validation", options.context);
    text_ = std::move(text);
  }
  return *text_;
}

int ranks_to_start(const TrainOptions& asked, FileSystem& files) {
  if (!asked.resume || asked.given.contains("ranks") || launched_ranks() > 1) return ranks_to_run(asked);
  const Path out = resumed_folder(asked, files);
  const std::optional<std::int64_t> newest = newest_checkpoint(out, files);
  if (!newest) return 1;  // the complaint comes when the run starts
  return static_cast<int>(read_config(checkpoint_path(out, *newest), files).options.ranks);
}

Start start_run(TrainOptions asked, FileSystem& files, SharedText& text, const World& world) {
  const Group& group = world.group();
  check_alike(asked.resume, group);
  asked.ranks = group.size();
  asked.given.insert("ranks");
  const bool first = group.rank() == 0;
  Start start;
  if (first)
    start = asked.resume ? resumed_start(asked, files, text, world) : new_start(asked, files, text, world);
  const std::string out = first_ones(group, start.out.string());
  const std::string config = first_ones(group, first ? config_text(start.config) : std::string());
  if (first) return start;
  start = {out, parse_config(config)};
  if (!start.config.options.model.empty()) {
    text.tokens(start.config, start.out, files);
    check_base(start.config, text.base_digest(start.config.options, files));
    return start;
  }
  check<ValueError>(text.get(start.config.options, files).digest == start.config.data_digest,
                    "--data: rank {} finds other data than rank 0; give all machines the same files",
                    group.rank());
  return start;
}

}  // namespace sherd::tools
