#include "tools/train.h"

#include <chrono>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "collectives/world.h"
#include "nn/grad_scaler.h"
#include "nn/optimizer.h"
#include "nn/schedules.h"
#include "runtime/context.h"
#include "runtime/error.h"
#include "runtime/late_value.h"
#include "runtime/log.h"
#include "runtime/timeline.h"
#include "shard/fully_shard.h"
#include "tools/among_ranks.h"
#include "tools/byte_job.h"
#include "tools/metrics.h"
#include "tools/start.h"
#include "tools/trace.h"
#include "tools/training_job.h"
#include "tools/tuning_job.h"

namespace sherd::tools {
namespace {

using Path = FileSystem::Path;

/// Time spent since it was started.
class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

/// What is trained; matrices decay, vectors do not.
std::vector<nn::ParamGroup> groups(const nn::Module& model, double weight_decay) {
  nn::ParamGroup matrices{.weight_decay = weight_decay}, vectors{.weight_decay = 0};
  for (const nn::Parameter& p : model.parameters())
    if (p.requires_grad()) (p.shape().rank() >= 2 ? matrices : vectors).params.push_back(p);
  return {std::move(matrices), std::move(vectors)};
}

/// Keeps the data that `text` has.
std::unique_ptr<TrainingJob> job_of(const Start& start, SharedText& text, const World& world,
                                    FileSystem& files) {
  const TrainOptions& options = start.config.options;
  if (options.model.empty()) return std::make_unique<ByteJob>(options, text.get(options, files), world);
  return std::make_unique<TuningJob>(options, text.tokens(start.config, start.out, files), world, files);
}

/// What a step was done with, and what it met: numbers that may still be on their way from a device.
struct Step {
  std::int64_t number;
  double lr;
  std::vector<TrainingJob::Part> losses;
  LateValue norm;
  std::optional<LateValue> skipped;  ///< not 0 where a scaled gradient overflowed
  double seconds;                    ///< that the host was at it, so far
  std::int64_t memory;               ///< bytes that this rank's tensors held at most
  std::int64_t tokens;               ///< of the batch, over all ranks
};

/// Who hears of the run here, and who may end it.
struct Ears {
  Reporter& reporter;
  bool may_stop;  ///< it is asked on this rank: on one of each process, since a signal reaches one process
};

/// One rank's part in a run, from its first or next step to its last. What all ranks take part in is called
/// on all of them alike; the folder is rank 0's, who lets the others write their parts of checkpoints.
class Run {
 public:
  Run(const World& world, Start start, std::unique_ptr<TrainingJob> job, FileSystem& files, Ears ears)
      : lock_(std::move(start.lock)),
        group_(world.group()),
        out_(std::move(start.out)),
        config_(std::move(start.config)),
        files_(files),
        ears_(ears),
        job_(std::move(job)),
        optimizer_(groups(job_->model(), options().weight_decay),
                   {.lr = options().lr, .beta2 = options().beta2}),
        schedule_{options().lr, options().min_lr, options().warmup,
                  std::max(options().steps, options().warmup)},
        scaler_({.scaling = options().param_dtype == "f16" ? nn::Scaling::on : nn::Scaling::off}) {
    set_generator(Context::current().generator().state());
  }

  /// The first checkpoint, so that a run can be resumed however early it dies.
  void begin() { save(); }

  /// Goes back to the checkpoint that the configuration is of.
  void restore() {
    load_states(checkpoint_path(out_, config_.step), options(), job_->model(), optimizer_, group_, files_);
    set_generator(config_.generator);
    restore_scale();
    if (!leads()) return;
    cut_metrics(out_ / speed_name, config_.step, files_,
                "tokens_per_s");  // first: what refuses it changes nothing
    cut_metrics(out_ / metrics_name, config_.step, files_);
    remove_old(out_, config_, files_);  // which the end may have come before
  }

  Device device() const { return device_named(options().device); }
  void watch(Trace& trace) { trace.watch(job_->model()); }

  TrainResult finish() {
    if (leads()) announce();
    const bool finished = train_steps();
    TrainResult result;
    if (finished) {
      result.val_loss = job_->validate(TrainingJob::Extent::all);
      job_->finish(out_, checkpoint_path(out_, config_.best ? config_.best->step : config_.step), result);
    }
    if (!leads()) return {};
    result.out = out_;
    result.step = config_.step;
    result.loss = config_.loss;
    result.bigram = bigram_.value_or(0);
    result.tokens_per_s = tokens_per_s();
    if (finished) {
      nlohmann::ordered_json line = {{"step", config_.step}, {"final_val_loss", *result.val_loss}};
      if (bigram_) line["bigram"] = *bigram_;
      metrics_->add(line);
      metrics_->sync();
    }
    ears_.reporter.finished(result);
    return result;
  }

 private:
  const TrainOptions& options() const { return config_.options; }
  bool leads() const { return group_.rank() == 0; }

  /// Each rank drops other features: it has other data. The leader's key is the run's.
  void set_generator(RandomKey key) {
    key.seed = derived_seed(key.seed, static_cast<std::uint64_t>(group_.rank()));
    Context::current().set_generator(Generator(key));
  }

  void announce() {
    RunFacts facts{.out = out_, .step = config_.step, .steps = options().steps};
    facts.parameters = job_->model().parameter_count();
    job_->describe(facts);
    bigram_ = facts.bigram;
    ears_.reporter.started(facts);
    metrics_.emplace(out_ / metrics_name, files_);
    speed_.emplace(out_ / speed_name, files_);
    if (options().warmup > options().steps)
      write_log(LogLevel::warning,
                "train: the learning rate rises for {} steps, and there are {}; give a shorter --warmup",
                options().warmup, options().steps);
  }

  /// False when somebody wanted to stop. A step's numbers are read when the next one is under way, so that a
  /// device goes on meanwhile; before a validation or a checkpoint they are read at once.
  bool train_steps() {
    const Stopwatch session;
    std::optional<Step> unread;
    for (std::int64_t done = 1; config_.step < options().steps; ++done) {
      std::optional<Step> before = std::exchange(unread, take_step());
      const auto seconds_a_step = [&] { return session.seconds() / static_cast<double>(done); };
      if (before) tell(*before, read(*before), {}, seconds_a_step());
      std::optional<double> val_loss;
      const auto settle = [&] {
        const Step step = *std::exchange(unread, {});
        const Numbers numbers = read(step);
        if (is_validated(step.number)) val_loss = validate_step();
        tell(step, numbers, val_loss, seconds_a_step());
      };
      if (is_validated(config_.step)) settle();
      const bool wanted = any(group_, ears_.may_stop && ears_.reporter.stop_wanted());
      const bool stops = wanted && config_.step < options().steps;
      if (stops && unread) settle();
      if (val_loss || stops) save();
      if (stops) return false;
    }
    return true;
  }

  bool is_validated(std::int64_t step) const {
    return step % options().eval_every == 0 || step == options().steps;
  }

  /// On all ranks: the mean loss of the whole batch and the norm of its gradient, both finite unless the step
  /// was skipped.
  struct Numbers {
    double loss, norm;
    bool skipped;
    double seconds;  ///< of the whole step
  };
  Numbers read(const Step& step) {
    const Stopwatch watch;
    double own = 0;
    for (const TrainingJob::Part& part : step.losses) own += part.loss.read() * part.share;
    Numbers numbers{mean(group_, own), step.norm.read(), step.skipped && step.skipped->read() != 0, 0};
    check_finite("loss", numbers.loss, step.number);
    if (!numbers.skipped) check_finite("norm of the gradient", numbers.norm, step.number);
    config_.loss = numbers.loss;
    const double seconds = watch.seconds();
    trained_seconds_ += seconds;
    numbers.seconds = step.seconds + seconds;
    return numbers;
  }

  /// Rank 0 writes down and reports a step.
  void tell(const Step& step, const Numbers& numbers, std::optional<double> val_loss, double seconds_a_step) {
    if (!leads()) return;
    nlohmann::ordered_json line = {
        {"step", step.number}, {"loss", numbers.loss}, {"lr", step.lr}, {"grad_norm", numbers.norm}};
    if (numbers.skipped) {
      line["grad_norm"] = nullptr;
      line["skipped"] = true;
    }
    if (val_loss) line["val_loss"] = *val_loss;
    metrics_->add(line);
    speed_->add({{"step", step.number},
                 {"tokens_per_s", static_cast<double>(step.tokens) / numbers.seconds},
                 {"memory", step.memory}});
    const auto left = static_cast<double>(options().steps - step.number);
    ears_.reporter.stepped(
        {step.number, options().steps, numbers.loss, tokens_per_s(), seconds_a_step * left});
    if (val_loss) ears_.reporter.validated(step.number, *val_loss);
  }

  Step take_step() {
    const TimelineSlice slice("step", "step");
    const Stopwatch watch;
    MemoryLedger& memory = Context::current().memory();
    memory.reset_peak(device().type);
    const double lr = schedule_(config_.step);
    const std::int64_t tokens = job_->tokens(config_.step);
    std::vector<TrainingJob::Part> losses =
        job_->forward_backward(config_.step, [&](const Tensor& loss) { scaler_.scale(loss).backward(); });
    const double limit = options().clip > 0 ? options().clip : std::numeric_limits<double>::infinity();
    scaler_.unscale_(optimizer_);
    const Tensor whole = shard::grad_norm(job_->model().parameters());
    LateValue norm(whole);
    optimizer_.set_lr(lr);
    std::optional<LateValue> skipped;
    if (scaler_.enabled()) {
      nn::clip_grads_with_norm_(job_->model().parameters(), limit, whole);
      skipped.emplace(scaler_.step(optimizer_));
    } else {
      optimizer_.step_clipped(whole, limit);
    }
    scaler_.update();
    optimizer_.zero_grad();
    ++config_.step;
    trained_tokens_ += tokens;
    const double seconds = watch.seconds();
    trained_seconds_ += seconds;
    return {config_.step,       lr,      std::move(losses),          std::move(norm),
            std::move(skipped), seconds, memory.peak(device().type), tokens};
  }

  std::optional<LossScale> scale_now() const {
    if (!scaler_.enabled()) return {};
    LossScale now;
    for (const auto& [name, value] : scaler_.state_dict()) {
      if (name == "scale") now.scale = value.item();
      if (name == "growth_tracker") now.steps = value.item<std::int64_t>();
    }
    return now;
  }
  /// A run that trained in another dtype before has no scale yet.
  void restore_scale() {
    if (!config_.loss_scale) return;
    nn::StateDict state = scaler_.state_dict();
    for (auto& [name, value] : state) {
      if (name == "scale") value = Tensor::scalar(config_.loss_scale->scale, {f32});
      if (name == "growth_tracker") value = Tensor::scalar(config_.loss_scale->steps, {i64});
    }
    scaler_.load_state_dict(state);
  }

  void check_finite(std::string_view what, double value, std::int64_t step) const {
    check<StateError>(std::isfinite(value),
                      "train: the {} is {} at step {}; the checkpoints in '{}' are from before it; a lower "
                      "--lr or --clip may help",
                      what, value, step, out_.string());
  }

  double validate_step() {
    const TimelineSlice slice("step", "validation");
    const double loss = job_->validate(TrainingJob::Extent::sample);
    check_finite("validation loss", loss, config_.step);
    if (!config_.best || loss < config_.best->loss) config_.best = {config_.step, loss};
    return loss;
  }

  void save() {
    const TimelineSlice slice("step", "checkpoint");
    if (leads()) {
      if (metrics_) metrics_->sync();  // a checkpoint promises the lines up to its step
      config_.generator = Context::current().generator().state();
      config_.loss_scale = scale_now();
    }
    save_checkpoint(out_, config_, job_->model(), optimizer_, group_, files_);
    if (!leads()) return;
    remove_old(out_, config_, files_);
    ears_.reporter.saved(checkpoint_path(out_, config_.step));
  }

  double tokens_per_s() const {
    return trained_seconds_ > 0 ? static_cast<double>(trained_tokens_) / trained_seconds_ : 0;
  }

  std::unique_ptr<FileLock> lock_;  // to the end
  Group group_;
  Path out_;
  RunConfig config_;
  FileSystem& files_;
  Ears ears_;
  std::unique_ptr<TrainingJob> job_;
  nn::AdamW optimizer_;
  nn::CosineSchedule schedule_;
  nn::GradScaler scaler_;
  std::optional<double> bigram_;
  std::optional<Metrics> metrics_, speed_;
  std::int64_t trained_tokens_ = 0;
  double trained_seconds_ = 0;
};

}  // namespace

Reporter::~Reporter() = default;
TrainingJob::~TrainingJob() = default;

TrainResult train(const TrainOptions& asked, FileSystem& files, Reporter& reporter) {
  check_ranges(asked);
  if (asked.threads > 0) Context::current().set_threads(asked.threads);
  SharedText text;
  TrainResult result;
  const std::thread::id caller = std::this_thread::get_id();
  run_ranks(ranks_to_start(asked, files), [&](World& world) {
    const bool first = world.rank() == 0;
    const bool may_stop = first || std::this_thread::get_id() == caller;
    if (may_stop) reporter.met();
    Start start = start_run(asked, files, text, world);
    std::optional<Trace> trace;  // outlives the modules that it watches
    std::unique_ptr<TrainingJob> job = job_of(start, text, world, files);
    Run run(world, std::move(start), std::move(job), files, {reporter, may_stop});
    asked.resume ? run.restore() : run.begin();
    if (!asked.trace.empty()) run.watch(trace.emplace(asked.trace, files, world.group(), run.device()));
    TrainResult mine = run.finish();
    if (trace) trace->finish();
    if (first) result = std::move(mine);
  });
  return result;
}

}  // namespace sherd::tools
