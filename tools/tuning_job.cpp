#include "tools/tuning_job.h"

#include <algorithm>
#include <array>

#include "nn/lora.h"
#include "runtime/context.h"
#include "runtime/generator.h"
#include "runtime/io/durable.h"
#include "runtime/ops.h"
#include "shard/checkpoint.h"
#include "shard/convert.h"
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

/// The record in another dtype, cast when it is read.
TensorRecord cast_record(const TensorRecord& from, DType dtype) {
  return {from.name, dtype, from.shape, {}, [&from, dtype](std::span<std::byte> into) {
            const NoGrad guard;
            const Shape shape(std::span(from.shape));
            const Tensor values = empty(shape, {from.dtype, Device::cpu()});
            const std::span<std::byte> bytes{values.raw(), static_cast<std::size_t>(values.spec().bytes())};
            if (from.read)
              from.read(bytes);
            else
              std::ranges::copy(from.bytes, bytes.begin());
            copy_(from_blob(into.data(), shape, dtype), to(values, dtype));
          }};
}

/// What lies beside a model for those who use it.
void copy_beside(const Path& from, const Path& to, FileSystem& files) {
  for (const char* name :
       {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
        "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"}) {
    if (!files.exists(from / name)) continue;
    const std::unique_ptr<InputFile> file = files.open(from / name);
    write_durably(
        to / name,
        [&](OutputFile& copy) {
          std::vector<std::byte> part;
          for (std::uint64_t at = 0; at < file->size(); at += part.size()) {
            part.resize(std::min<std::uint64_t>(1 << 20, file->size() - at));
            file->read(at, part);
            copy.write(part);
          }
        },
        files);
  }
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
    const Tensor logits = model_.logits(batch);
    const Tensor sum =
        nn::packed_loss(logits, to(batch.targets, logits.device()), std::max<std::int64_t>(learnt, 1));
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
  const nn::PackedBatch batch = tokens_.validation.batch(std::array{row});
  const Tensor logits = model_.logits(batch);
  return nn::packed_loss(logits, to(batch.targets, logits.device()), 1).item();
}

double TuningJob::validate(Extent extent) {
  const std::int64_t all = tokens_.validation.rows(),
                     sampled = std::max<std::int64_t>(validation_sample / options_.context, 1),
                     count = extent == Extent::all ? all : std::min(all, sampled);
  const NoGrad guard;
  model_.module().eval();
  double loss = 0;
  std::int64_t learnt = 0;
  const auto row = [&](std::int64_t i) { return i * all / count; };
  for (std::int64_t first = 0; first < count; first += group_.size()) {
    // Without a row left a rank repeats the last one: all run the model alike.
    const std::vector<double> losses =
        everyones(group_, summed_loss(row(std::min(first + group_.rank(), count - 1))));
    for (std::int64_t i = first; i < std::min<std::int64_t>(first + group_.size(), count); ++i) {
      loss += losses[static_cast<std::size_t>(i - first)];
      learnt += tokens_.validation.learnt(row(i));
    }
  }
  model_.module().train();
  return loss / static_cast<double>(std::max<std::int64_t>(learnt, 1));
}

void TuningJob::describe(RunFacts& facts) const {
  facts.files = tokens_.files;
  facts.train_bytes = static_cast<std::int64_t>(tokens_.train.text().tokens.size());
  facts.validation_bytes = static_cast<std::int64_t>(tokens_.validation.text().tokens.size());
  facts.trained = trained_;
}

/// The folder of the checkpoint that validated best, as the model's own folder is: in its dtype, with its
/// tokenizer; of adapters PEFT's folder.
void TuningJob::finish(const Path& out, const Path& best, TrainResult& result) {
  if (group_.rank() != 0) return;
  result.tuned = out / (options_.lora > 0 ? "adapter" : "tuned");
  if (files_.exists(result.tuned)) remove_durably(result.tuned, files_);  // of an earlier end of the run
  if (options_.lora > 0) {
    TunedModel whole = TunedModel::read(options_, files_);
    shard::load_checkpoint(whole.module(), best, {}, files_);
    nn::save_lora(whole.module(), result.tuned, {options_.model, files_});
    return;
  }
  const shard::WholeTensors whole = shard::checkpoint_tensors(best, {.files = files_});
  const DType dtype = nn::pretrained_kind(options_.model, files_) == nn::PretrainedKind::gpt
                          ? nn::gpt_options(options_.model, files_).tensor.dtype
                          : nn::llama_options(options_.model, files_).tensor.dtype;
  std::vector<TensorRecord> records;
  for (const TensorRecord& record : whole.tensors) records.push_back(cast_record(record, dtype));
  nn::save_pretrained(records, result.tuned, {.config_from = options_.model, .files = files_});
  copy_beside(options_.model, result.tuned, files_);
}

}  // namespace sherd::tools
