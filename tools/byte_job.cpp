#include "tools/byte_job.h"

#include <limits>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/summon.h"
#include "tools/evaluate.h"
#include "tools/generate.h"
#include "tools/sharding.h"

namespace sherd::tools {
namespace {

/// Bytes of the validation part that the validations on the way look at; the one at the end takes all.
constexpr std::int64_t validation_sample = 16384;

nn::Gpt seeded_model(const TrainOptions& options) {
  manual_seed(options.seed);
  nn::Gpt model(model_options(options));
  model.to(device_named(options.device));
  return model;
}

}  // namespace

ByteJob::ByteJob(const TrainOptions& options, const Text& text, const World& world)
    : options_(options),
      text_(text),
      group_(world.group()),
      model_(seeded_model(options)),
      replicas_(shard_model(model_, options, world)),
      sampler_(window_starts(text.train.size(), options.context),
               {.batch = options.batch, .seed = options.seed, .rank = group_.rank(), .world = group_.size()}),
      bigram_(group_.rank() == 0 ? bigram_loss(text) : 0) {}

/// All ranks have equal shares, so their average is the whole batch's.
std::vector<TrainingJob::Part> ByteJob::forward_backward(std::int64_t step,
                                                         const std::function<void(const Tensor&)>& backward) {
  const std::vector<std::int64_t> samples = sampler_.at(step);
  std::span<const std::int64_t> rest = samples;
  const std::size_t rows =
      options_.micro_batch > 0 ? static_cast<std::size_t>(options_.micro_batch) : samples.size();
  std::vector<Part> losses;
  while (!rest.empty()) {
    const std::size_t n = std::min(rows, rest.size());
    const double share = static_cast<double>(n) / static_cast<double>(samples.size());
    const nn::Batch batch = batch_for(model_, text_.train, rest.first(n));
    Tensor logits = flatten(model_(batch.tokens), 0, 1);
    const Tensor loss = training_loss(std::exchange(logits, {}), flatten(batch.targets), share);
    backward(share < 1 ? mul(loss, share) : loss);
    losses.push_back({LateValue(loss), share});
    rest = rest.subspan(n);
  }
  return losses;
}

std::int64_t ByteJob::tokens(std::int64_t /*step*/) const { return options_.batch * options_.context; }

double ByteJob::validate(Extent extent) {
  const std::int64_t windows = extent == Extent::all
                                   ? std::numeric_limits<std::int64_t>::max()
                                   : std::max<std::int64_t>(validation_sample / options_.context, 1);
  return evaluate(model_, text_.validation, windows, group_);
}

void ByteJob::describe(RunFacts& facts) const {
  facts.files = text_.files;
  facts.train_bytes = static_cast<std::int64_t>(text_.train.size());
  facts.validation_bytes = static_cast<std::int64_t>(text_.validation.size());
  facts.bigram = bigram_;
}

void ByteJob::finish(const FileSystem::Path& /*out*/, const FileSystem::Path& /*best*/, TrainResult& result) {
  result.sample = sample();
}

/// What `sherd sample` would make of the last checkpoint.
std::string ByteJob::sample() {
  std::optional<nn::Gpt> whole;
  {  // other ranks hold one unit's parameters at a time
    const auto scope = shard::summon_full_params(model_, {.writeback = false, .rank0_only = true});
    if (group_.rank() != 0) return {};
    whole.emplace(model_options(options_));
    whole->load_state_dict(model_.state_dict());
  }
  whole->eval();
  return generate(*whole, "\n", {.tokens = options_.sample, .seed = options_.seed});
}

}  // namespace sherd::tools
