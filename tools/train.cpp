#include "tools/train.h"

#include <chrono>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "nn/batch_sampler.h"
#include "nn/optimizer.h"
#include "runtime/context.h"
#include "runtime/error.h"
#include "tools/checkpoint.h"
#include "tools/default_text.h"
#include "tools/evaluate.h"
#include "tools/generate.h"
#include "tools/metrics.h"
#include "tools/run_folder.h"
#include "tools/text.h"

namespace sherd::tools {
namespace {

using Path = FileSystem::Path;

/// Bytes of the validation part that the validations on the way look at; the one at the end takes all.
constexpr std::int64_t validation_sample = 16384;

/// Time spent since it was started.
class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

nn::Gpt seeded_model(const TrainOptions& options) {
  manual_seed(options.seed);
  return nn::Gpt(model_options(options));
}

/// Matrices decay, vectors do not.
std::vector<nn::ParamGroup> groups(const nn::Gpt& model, double weight_decay) {
  nn::ParamGroup matrices{.weight_decay = weight_decay}, vectors{.weight_decay = 0};
  for (const nn::Parameter& p : model.parameters())
    (p.shape().rank() >= 2 ? matrices : vectors).params.push_back(p);
  return {std::move(matrices), std::move(vectors)};
}

RunConfig fresh_config(const TrainOptions& asked) {
  RunConfig config{.options = asked};
  if (config.options.data.empty()) config.options.data = default_text();
  // The run may be resumed from another folder.
  for (std::string& path : config.options.data)
    path = std::filesystem::absolute(path).lexically_normal().string();
  return config;
}

RunConfig resumed_config(const TrainOptions& asked, const Path& checkpoint, FileSystem& files) {
  RunConfig config = read_config(checkpoint, files);
  std::vector<std::string> data = asked.data.empty() ? config.options.data : asked.data;
  config.options = resumed(asked, config.options, config.step, config.changes);
  config.options.data = std::move(data);
  check<ValueError>(config.options.steps >= config.step, "--steps {}: the run has done {} already",
                    config.options.steps, config.step);
  return config;
}

void check_length(std::span<const std::uint8_t> part, std::string_view name, std::int64_t context) {
  check<ValueError>(static_cast<std::int64_t>(part.size()) > context,
                    "--context {}: the {} part of the data has {} bytes, at least {} are needed; give more "
                    "data or a shorter context",
                    context, name, part.size(), context + 1);
}

Text checked_text(const TrainOptions& options, FileSystem& files) {
  Text text = read_text(options.data, files);
  check_length(text.train, "training", options.context);
  check_length(text.validation, "validation", options.context);
  return text;
}

/// One run from its first or next step to its last.
class Run {
 public:
  Run(const Path& out, RunConfig config, Text text, FileSystem& files, Reporter& reporter)
      : out_(out),
        config_(std::move(config)),
        text_(std::move(text)),
        files_(files),
        reporter_(reporter),
        model_(seeded_model(options())),
        optimizer_(groups(model_, options().weight_decay), {.lr = options().lr, .beta2 = options().beta2}),
        sampler_(static_cast<std::int64_t>(text_.train.size()) - options().context,
                 {.batch = options().batch, .seed = options().seed}),
        schedule_{options().lr, options().min_lr, options().warmup, options().steps},
        bigram_(bigram_loss(text_)) {}

  /// The first checkpoint, so that a run can be resumed however early it dies.
  void begin() {
    config_.data_digest = text_.digest;
    save();
  }

  /// Goes back to the checkpoint that the configuration is of.
  void restore() {
    check<ValueError>(text_.digest == config_.data_digest,
                      "--resume: the data is not what the run in '{}' was started with", out_.string());
    const Path checkpoint = checkpoint_path(out_, config_.step);
    load_model(checkpoint, model_, files_);
    load_optimizer(checkpoint, optimizer_, files_);
    Context::current().generator().set_state(config_.generator);
    sampler_.set_step(config_.step);
    cut_metrics(out_ / "metrics.jsonl", config_.step, files_);
    remove_old(out_, config_, files_);  // which the end may have come before
  }

  TrainResult finish() {
    reporter_.started({out_, config_.step, options().steps, model_.parameter_count(), text_.files,
                       static_cast<std::int64_t>(text_.train.size()),
                       static_cast<std::int64_t>(text_.validation.size()), bigram_});
    metrics_.emplace(out_ / "metrics.jsonl", files_);
    const bool finished = train_steps();
    TrainResult result{.out = out_,
                       .step = config_.step,
                       .loss = config_.loss,
                       .bigram = bigram_,
                       .tokens_per_s = tokens_per_s()};
    if (!finished) return result;
    result.val_loss = evaluate(model_, text_.validation, std::numeric_limits<std::int64_t>::max());
    metrics_->add({{"step", config_.step}, {"final_val_loss", *result.val_loss}, {"bigram", bigram_}});
    metrics_->sync();
    model_.eval();
    result.sample = generate(model_, "\n", {.tokens = options().sample, .seed = options().seed});
    return result;
  }

 private:
  const TrainOptions& options() const { return config_.options; }

  /// False when the reporter wanted to stop.
  bool train_steps() {
    const Stopwatch session;
    for (std::int64_t done = 1; config_.step < options().steps; ++done) {
      nlohmann::ordered_json line = step();
      const bool validates = config_.step % options().eval_every == 0 || config_.step == options().steps;
      if (validates) line["val_loss"] = validate_step();
      metrics_->add(line);
      const auto left = static_cast<double>(options().steps - config_.step);
      reporter_.stepped({config_.step, options().steps, config_.loss, tokens_per_s(),
                         session.seconds() / static_cast<double>(done) * left});
      if (validates) reporter_.validated(config_.step, line["val_loss"]);
      const bool stops = reporter_.stop_wanted() && config_.step < options().steps;
      if (validates || stops) save();
      if (stops) return false;
    }
    return true;
  }

  /// One optimizer step; its line of metrics.
  nlohmann::ordered_json step() {
    const Stopwatch watch;
    const double lr = schedule_(config_.step);
    const double loss = forward_backward();
    check_finite("loss", loss, config_.step + 1);
    const double limit = options().clip > 0 ? options().clip : std::numeric_limits<double>::infinity();
    const std::vector<nn::Parameter> parameters = model_.parameters();
    const double norm = nn::clip_grad_norm_(parameters, limit).item();
    check_finite("norm of the gradient", norm, config_.step + 1);
    optimizer_.set_lr(lr);
    optimizer_.step();
    optimizer_.zero_grad();
    config_.loss = loss;
    ++config_.step;
    trained_tokens_ += options().batch * options().context;
    trained_seconds_ += watch.seconds();
    return {{"step", config_.step}, {"loss", loss}, {"lr", lr}, {"grad_norm", norm}};
  }

  /// Gradients of the mean loss over the whole batch, micro-batch by micro-batch; gives that loss.
  double forward_backward() {
    const std::vector<std::int64_t> samples = sampler_.next();
    std::span<const std::int64_t> rest = samples;
    const auto rows =
        static_cast<std::size_t>(options().micro_batch > 0 ? options().micro_batch : options().batch);
    double sum = 0;
    while (!rest.empty()) {
      const std::size_t n = std::min(rows, rest.size());
      const double share = static_cast<double>(n) / static_cast<double>(samples.size());
      const nn::Batch batch = nn::text_batch(text_.train, rest.first(n), options().context);
      const Tensor loss = cross_entropy(flatten(model_(batch.tokens), 0, 1), flatten(batch.targets));
      (share < 1 ? mul(loss, share) : loss).backward();
      sum += loss.item() * share;
      rest = rest.subspan(n);
    }
    return sum;
  }

  void check_finite(std::string_view what, double value, std::int64_t step) const {
    check<StateError>(std::isfinite(value),
                      "train: the {} is {} at step {}; the checkpoints in '{}' are from before it; a lower "
                      "--lr or --clip may help",
                      what, value, step, out_.string());
  }

  double validate_step() {
    const double loss =
        evaluate(model_, text_.validation, std::max<std::int64_t>(validation_sample / options().context, 1));
    check_finite("validation loss", loss, config_.step);
    if (!config_.best || loss < config_.best->loss) config_.best = {config_.step, loss};
    return loss;
  }

  void save() {
    if (metrics_) metrics_->sync();  // a checkpoint promises the lines up to its step
    config_.generator = Context::current().generator().state();
    save_checkpoint(out_, config_, model_, optimizer_, files_);
    remove_old(out_, config_, files_);
    reporter_.saved(checkpoint_path(out_, config_.step));
  }

  double tokens_per_s() const {
    return trained_seconds_ > 0 ? static_cast<double>(trained_tokens_) / trained_seconds_ : 0;
  }

  Path out_;
  RunConfig config_;
  Text text_;
  FileSystem& files_;
  Reporter& reporter_;
  nn::Gpt model_;
  nn::AdamW optimizer_;
  nn::BatchSampler sampler_;
  nn::CosineSchedule schedule_;
  double bigram_;
  std::optional<Metrics> metrics_;
  std::int64_t trained_tokens_ = 0;
  double trained_seconds_ = 0;
};

}  // namespace

Reporter::~Reporter() = default;

TrainResult train(const TrainOptions& asked, FileSystem& files, Reporter& reporter) {
  validate(asked);
  if (asked.threads > 0) Context::current().set_threads(asked.threads);
  const Path out = run_folder(asked, files);
  RunConfig config = asked.resume
                         ? resumed_config(asked, checkpoint_path(out, newest_step(out, files)), files)
                         : fresh_config(asked);
  validate(config.options);
  Text text = checked_text(config.options, files);
  if (!asked.resume) create_run_folder(out, files);
  Run run(out, std::move(config), std::move(text), files, reporter);
  asked.resume ? run.restore() : run.begin();
  return run.finish();
}

}  // namespace sherd::tools
