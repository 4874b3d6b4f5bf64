#include "tools/tuning_job.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "runtime/context.h"
#include "runtime/generator.h"
#include "runtime/io/durable.h"
#include "runtime/ops.h"
#include "tools/among_ranks.h"
#include "tools/sharding.h"

namespace sherd::tools {
namespace {

using Path = FileSystem::Path;

/// Tokens of the validation part that the validations on the way look at; the one at the end takes all.
constexpr std::int64_t validation_sample = 65536;

nn::EpochSampler sampler_of(const Tokens& tokens, const TrainOptions& o, int rank, int world) {
  return nn::EpochSampler(tokens.train.rows(),
                          {.batch = o.batch, .seed = o.seed, .rank = rank, .world = world});
}

}  // namespace

TuningJob::TuningJob(const TrainOptions& options, const Tokens& tokens, const World& world, FileSystem& files)
    : options_(options),
      tokens_(tokens),
      group_(world.group()),
      files_(files),
      model_(TunedModel::to_share(options, files)),
      replicas_(shard_model(model_.module(), model_.blocks(), options, world)),
      mine_(sampler_of(tokens, options, group_.rank(), group_.size())),
      all_(sampler_of(tokens, options, 0, 1)) {
  model_.load(options, files);
  for (const nn::Parameter& p : model_.module().parameters())
    if (p.requires_grad()) trained_ += p.numel();
}

/// Each part is divided by what the batch has to learn on all ranks, times the ranks over which gradients are
/// averaged.
std::vector<TrainingJob::Part> TuningJob::forward_backward(
    std::int64_t step, const std::function<void(const Tensor&)>& backward) {
  // Ranks have rows of other lengths, so what they draw in a step must not follow from what they drew before:
  // a checkpoint has the first one's generator alone.
  const std::uint64_t mine = derived_seed(options_.seed, 1 + static_cast<std::uint64_t>(group_.rank()));
  Context::current().set_generator(Generator(derived_seed(mine, static_cast<std::uint64_t>(step))));
  const std::vector<std::int64_t> rows = mine_.at(step);
  std::int64_t learnt = 0;
  for (const std::int64_t row : all_.at(step)) learnt += tokens_.train.learnt(row);
  const std::size_t at_once =
      options_.micro_batch > 0 ? static_cast<std::size_t>(options_.micro_batch) : rows.size();
  std::vector<Part> losses;
  for (std::span<const std::int64_t> rest = rows; !rest.empty();) {
    const std::size_t n = std::min(at_once, rest.size());
    const nn::PackedBatch batch = tokens_.train.batch(rest.first(n));
    const Tensor sum = model_.loss(batch, learnt);
    const Tensor loss = group_.size() > 1 ? mul(sum, static_cast<double>(group_.size())) : sum;
    backward(loss);
    losses.push_back({LateValue(loss), 1});
    rest = rest.subspan(n);
  }
  return losses;
}

std::int64_t TuningJob::tokens(std::int64_t step) const {
  std::int64_t count = 0;
  for (const std::int64_t row : all_.at(step)) count += tokens_.train.tokens(row);
  return count;
}

double TuningJob::summed_loss(std::int64_t row) {
  return model_.loss(tokens_.validation.batch(std::array{row}), 1).item();
}

double TuningJob::validate(Extent extent) {
  const std::int64_t all = tokens_.validation.rows(),
                     sampled = std::max<std::int64_t>(validation_sample / options_.context, 1),
                     count = extent == Extent::all ? all : std::min(all, sampled);
  const NoGrad guard;
  model_.module().eval();
  const auto row = [&](std::int64_t i) { return i * all / count; };
  const std::vector<double> losses =
      shared_out(group_, count, [&](std::int64_t i) { return summed_loss(row(i)); });
  std::int64_t learnt = 0;
  for (std::int64_t i = 0; i < count; ++i) learnt += tokens_.validation.learnt(row(i));
  model_.module().train();
  return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(learnt);
}

void TuningJob::describe(RunFacts& facts) const {
  facts.files = tokens_.files;
  facts.train_bytes = static_cast<std::int64_t>(tokens_.train.text().tokens.size());
  facts.validation_bytes = static_cast<std::int64_t>(tokens_.validation.text().tokens.size());
  facts.trained = trained_;
}

void TuningJob::finish(const Path& out, const Path& best, TrainResult& result) {
  if (group_.rank() != 0) return;
  result.tuned = out / (options_.lora > 0 ? "adapter" : "tuned");
  if (files_.exists(result.tuned)) remove_durably(result.tuned, files_);  // of an earlier end of the run
  save_tuned(options_, best, "model", result.tuned, {.files = files_});
}

}  // namespace sherd::tools
