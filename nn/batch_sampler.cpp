#include "nn/batch_sampler.h"

#include <algorithm>
#include <utility>

#include "runtime/error.h"
#include "runtime/random.h"

namespace sherd::nn {
namespace {

/// A Philox stream of its own, so that samples do not repeat what the rank's generator draws from the same
/// seed.
constexpr std::uint64_t stream = 0x73616d706c657273;

/// An integer in [0, n) from two words; the bias is below n / 2^64.
std::int64_t below(const PhiloxWords& words, std::int64_t n) {
  const std::uint64_t word = words[0] | std::uint64_t{words[1]} << 32;
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::int64_t>(static_cast<Wide>(word) * static_cast<std::uint64_t>(n) >> 64);
}

}  // namespace

BatchSampler::BatchSampler(std::int64_t items, BatchSamplerOptions options)
    : items_(items), options_(options) {
  const auto& [batch, seed, rank, world] = options_;
  check<ValueError>(items > 0, "BatchSampler: {} items to draw from, at least 1 is needed", items);
  check<ValueError>(world > 0 && rank >= 0 && rank < world, "BatchSampler: rank {} of {}", rank, world);
  check<ValueError>(batch > 0 && batch % world == 0,
                    "BatchSampler: a batch of {} does not divide over {} ranks", batch, world);
}

std::vector<std::int64_t> BatchSampler::at(std::int64_t step) const {
  check<ValueError>(step >= 0, "BatchSampler: step {} is negative", step);
  std::vector<std::int64_t> samples(static_cast<std::size_t>(options_.batch / options_.world));
  const auto mine = static_cast<std::uint64_t>(options_.rank) * samples.size();
  std::uint64_t counter =
      static_cast<std::uint64_t>(step) * static_cast<std::uint64_t>(options_.batch) + mine;
  for (std::int64_t& sample : samples) sample = below(philox(options_.seed, counter++, stream), items_);
  return samples;
}

void BatchSampler::set_step(std::int64_t step) {
  check<ValueError>(step >= 0, "BatchSampler: step {} is negative", step);
  step_ = step;
}

EpochSampler::EpochSampler(std::int64_t items, EpochSamplerOptions options)
    : items_(items), options_(options) {
  const auto& o = options_;
  check<ValueError>(items > 0, "EpochSampler: {} items to go through, at least 1 is needed", items);
  check<ValueError>(o.world > 0 && o.rank >= 0 && o.rank < o.world, "EpochSampler: rank {} of {}", o.rank,
                    o.world);
  check<ValueError>(o.batch > 0 && o.batch % o.world == 0,
                    "EpochSampler: a batch of {} does not divide over {} ranks", o.batch, o.world);
  check<ValueError>(o.last == LastBatch::keep || items >= o.batch,
                    "EpochSampler: {} items do not fill one batch of {}; keep the last batch", items,
                    o.batch);
}

std::int64_t EpochSampler::steps_per_epoch() const {
  return items_ / options_.batch + (options_.last == LastBatch::keep && items_ % options_.batch != 0);
}

std::vector<std::int64_t> EpochSampler::at(std::int64_t step) const {
  check<ValueError>(step >= 0, "EpochSampler: step {} is negative", step);
  const std::int64_t steps = steps_per_epoch(), epoch = step / steps;
  if (ordered_ != epoch && (options_.shuffle || order_.empty())) {
    order_.resize(static_cast<std::size_t>(items_));
    for (std::int64_t i = 0; i < items_; ++i) order_[static_cast<std::size_t>(i)] = i;
    // Fisher and Yates, with numbers of this epoch alone.
    for (std::int64_t i = items_ - 1; options_.shuffle && i > 0; --i) {
      const PhiloxWords words = philox(options_.seed, static_cast<std::uint64_t>(i),
                                       stream + 1 + static_cast<std::uint64_t>(epoch));
      std::swap(order_[static_cast<std::size_t>(i)], order_[static_cast<std::size_t>(below(words, i + 1))]);
    }
    ordered_ = epoch;
  }
  const std::int64_t first = step % steps * options_.batch, size = std::min(options_.batch, items_ - first);
  const std::int64_t begin = first + size * options_.rank / options_.world,
                     end = first + size * (options_.rank + 1) / options_.world;
  return {order_.begin() + begin, order_.begin() + end};
}

void EpochSampler::set_step(std::int64_t step) {
  check<ValueError>(step >= 0, "EpochSampler: step {} is negative", step);
  step_ = step;
}

Batch text_batch(std::span<const std::uint8_t> text, std::span<const std::int64_t> starts,
                 std::int64_t context) {
  const auto size = static_cast<std::int64_t>(text.size()), rows = static_cast<std::int64_t>(starts.size());
  check<ValueError>(context > 0, "text_batch: a context of {}, at least 1 is needed", context);
  const TensorOptions there{DType::i64, Device::cpu()};
  const Batch batch{empty({rows, context}, there), empty({rows, context}, there)};
  auto* tokens = batch.tokens.mutable_data<std::int64_t>();
  auto* targets = batch.targets.mutable_data<std::int64_t>();
  for (const std::int64_t start : starts) {
    check<ValueError>(start >= 0 && start < size - context,
                      "text_batch: a window of {} + 1 bytes from {} leaves the text of {} bytes", context,
                      start, size);
    const std::uint8_t* from = text.data() + start;
    tokens = std::copy(from, from + context, tokens);
    targets = std::copy(from + 1, from + 1 + context, targets);
  }
  return batch;
}

}  // namespace sherd::nn
