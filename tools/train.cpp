#include "tools/train.h"

#include <chrono>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "collectives/world.h"
#include "nn/batch_sampler.h"
#include "nn/grad_scaler.h"
#include "nn/optimizer.h"
#include "nn/schedules.h"
#include "runtime/context.h"
#include "runtime/error.h"
#include "runtime/late_value.h"
#include "runtime/log.h"
#include "runtime/timeline.h"
#include "shard/checkpoint.h"
#include "shard/fully_shard.h"
#include "shard/summon.h"
#include "tools/among_ranks.h"
#include "tools/evaluate.h"
#include "tools/generate.h"
#include "tools/metrics.h"
#include "tools/sharding.h"
#include "tools/start.h"
#include "tools/trace.h"

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
  nn::Gpt model(model_options(options));
  model.to(device_named(options.device));
  return model;
}

/// Matrices decay, vectors do not.
std::vector<nn::ParamGroup> groups(const nn::Gpt& model, double weight_decay) {
  nn::ParamGroup matrices{.weight_decay = weight_decay}, vectors{.weight_decay = 0};
  for (const nn::Parameter& p : model.parameters())
    (p.shape().rank() >= 2 ? matrices : vectors).params.push_back(p);
  return {std::move(matrices), std::move(vectors)};
}

/// What a step was done with, and what it met: numbers that may still be on their way from a device.
struct Step {
  struct Part {
    LateValue loss;
    double share;  ///< of the batch
  };
  std::int64_t number;
  double lr;
  std::vector<Part> losses;
  LateValue norm;
  std::optional<LateValue> skipped;  ///< not 0 where a scaled gradient overflowed
  double seconds;                    ///< that the host was at it, so far
  std::int64_t memory;               ///< bytes that this rank's tensors held at most
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
  Run(const World& world, Start start, const Text& text, FileSystem& files, Ears ears)
      : lock_(std::move(start.lock)),
        group_(world.group()),
        out_(std::move(start.out)),
        config_(std::move(start.config)),
        text_(text),
        files_(files),
        ears_(ears),
        model_(seeded_model(options())),
        replicas_(shard_model(model_, options(), world)),
        optimizer_(groups(model_, options().weight_decay), {.lr = options().lr, .beta2 = options().beta2}),
        sampler_(static_cast<std::int64_t>(text_.train.size()) - options().context, {.batch = options().batch,
                                                                                     .seed = options().seed,
                                                                                     .rank = group_.rank(),
                                                                                     .world = group_.size()}),
        schedule_{options().lr, options().min_lr, options().warmup,
                  std::max(options().steps, options().warmup)},
        scaler_({.scaling = options().param_dtype == "f16" ? nn::Scaling::on : nn::Scaling::off}) {
    set_generator(Context::current().generator().state());
  }

  /// The first checkpoint, so that a run can be resumed however early it dies.
  void begin() { save(); }

  /// Goes back to the checkpoint that the configuration is of.
  void restore() {
    shard::load_checkpoint(model_, optimizer_, checkpoint_path(out_, config_.step), group_, files_);
    set_generator(config_.generator);
    sampler_.set_step(config_.step);
    restore_scale();
    if (!leads()) return;
    cut_metrics(out_ / speed_name, config_.step, files_,
                "tokens_per_s");  // first: what refuses it changes nothing
    cut_metrics(out_ / metrics_name, config_.step, files_);
    remove_old(out_, config_, files_);  // which the end may have come before
  }

  Device device() const { return device_named(options().device); }
  void watch(Trace& trace) { trace.watch(model_); }

  TrainResult finish() {
    if (leads()) announce();
    const bool finished = train_steps();
    TrainResult result;
    if (finished) {
      result.val_loss = evaluate(model_, text_.validation, std::numeric_limits<std::int64_t>::max(), group_);
      result.sample = sample();
    }
    if (!leads()) return {};
    result.out = out_;
    result.step = config_.step;
    result.loss = config_.loss;
    result.bigram = bigram_;
    result.tokens_per_s = tokens_per_s();
    if (finished) {
      metrics_->add({{"step", config_.step}, {"final_val_loss", *result.val_loss}, {"bigram", bigram_}});
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
    bigram_ = bigram_loss(text_);
    ears_.reporter.started({out_, config_.step, options().steps, model_.parameter_count(), text_.files,
                            static_cast<std::int64_t>(text_.train.size()),
                            static_cast<std::int64_t>(text_.validation.size()), bigram_});
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
    for (const Step::Part& part : step.losses) own += part.loss.read() * part.share;
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
                 {"tokens_per_s", tokens_a_step() / numbers.seconds},
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
    std::vector<Step::Part> losses = forward_backward();
    const double limit = options().clip > 0 ? options().clip : std::numeric_limits<double>::infinity();
    scaler_.unscale_(optimizer_);
    const Tensor whole = shard::grad_norm(model_.parameters());
    LateValue norm(whole);
    optimizer_.set_lr(lr);
    std::optional<LateValue> skipped;
    if (scaler_.enabled()) {
      nn::clip_grads_with_norm_(model_.parameters(), limit, whole);
      skipped.emplace(scaler_.step(optimizer_));
    } else {
      optimizer_.step_clipped(whole, limit);
    }
    scaler_.update();
    optimizer_.zero_grad();
    ++config_.step;
    trained_tokens_ += options().batch * options().context;
    const double seconds = watch.seconds();
    trained_seconds_ += seconds;
    return {config_.step,       lr,      std::move(losses),         std::move(norm),
            std::move(skipped), seconds, memory.peak(device().type)};
  }

  /// Gradients of the mean loss over this rank's share of the batch, micro-batch by micro-batch; gives their
  /// losses. All ranks have equal shares, so their average is the whole batch's.
  std::vector<Step::Part> forward_backward() {
    const std::vector<std::int64_t> samples = sampler_.next();
    std::span<const std::int64_t> rest = samples;
    const std::size_t rows =
        options().micro_batch > 0 ? static_cast<std::size_t>(options().micro_batch) : samples.size();
    std::vector<Step::Part> losses;
    while (!rest.empty()) {
      const std::size_t n = std::min(rows, rest.size());
      const double share = static_cast<double>(n) / static_cast<double>(samples.size());
      const nn::Batch batch = batch_for(model_, text_.train, rest.first(n));
      Tensor logits = flatten(model_(batch.tokens), 0, 1);
      const Tensor loss = training_loss(std::exchange(logits, {}), flatten(batch.targets), share);
      scaler_.scale(share < 1 ? mul(loss, share) : loss).backward();
      losses.push_back({LateValue(loss), share});
      rest = rest.subspan(n);
    }
    return losses;
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
    const std::int64_t windows = std::max<std::int64_t>(validation_sample / options().context, 1);
    const double loss = evaluate(model_, text_.validation, windows, group_);
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
    save_checkpoint(out_, config_, model_, optimizer_, group_, files_);
    if (!leads()) return;
    remove_old(out_, config_, files_);
    ears_.reporter.saved(checkpoint_path(out_, config_.step));
  }

  /// What `sherd sample` would make of the last checkpoint.
  std::string sample() {
    std::optional<nn::Gpt> whole;
    {  // other ranks hold one unit's parameters at a time
      const auto scope = shard::summon_full_params(model_, {.writeback = false, .rank0_only = true});
      if (!leads()) return {};
      whole.emplace(model_options(options()));
      whole->load_state_dict(model_.state_dict());
    }
    whole->eval();
    return generate(*whole, "\n", {.tokens = options().sample, .seed = options().seed});
  }

  double tokens_a_step() const { return static_cast<double>(options().batch * options().context); }
  double tokens_per_s() const {
    return trained_seconds_ > 0 ? static_cast<double>(trained_tokens_) / trained_seconds_ : 0;
  }

  std::unique_ptr<FileLock> lock_;  // to the end
  Group group_;
  Path out_;
  RunConfig config_;
  const Text& text_;
  FileSystem& files_;
  Ears ears_;
  nn::Gpt model_;
  std::unique_ptr<shard::DataParallel> replicas_;
  nn::AdamW optimizer_;
  nn::BatchSampler sampler_;
  nn::CosineSchedule schedule_;
  nn::GradScaler scaler_;
  double bigram_ = 0;
  std::optional<Metrics> metrics_, speed_;
  std::int64_t trained_tokens_ = 0;
  double trained_seconds_ = 0;
};

}  // namespace

Reporter::~Reporter() = default;

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
    const Text& read = text.get(start.config.options, files);
    std::optional<Trace> trace;  // outlives the modules that it watches
    Run run(world, std::move(start), read, files, {reporter, may_stop});
    asked.resume ? run.restore() : run.begin();
    if (!asked.trace.empty()) run.watch(trace.emplace(asked.trace, files, world.group(), run.device()));
    TrainResult mine = run.finish();
    if (trace) trace->finish();
    if (first) result = std::move(mine);
  });
  return result;
}

}  // namespace sherd::tools
