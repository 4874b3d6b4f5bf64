// Choosing the samples that a training step uses, and making batches of text from them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/tensor.h"

namespace sherd::nn {

struct BatchSamplerOptions {
  std::int64_t batch = 1;  ///< samples a step, over all ranks
  std::uint64_t seed = 0;
  int rank = 0, world = 1;  ///< this rank's part of each batch: the parts in rank order are the batch
};

/// Draws sample numbers with replacement, uniformly from [0, items). A batch depends on the options and its
/// step alone: so the step is all there is to save, and every number of ranks trains on the same batches.
class SHERD_API BatchSampler {
 public:
  /// ValueError for no items, a rank outside [0, world), a batch below 1, and a batch that `world` does not
  /// divide.
  explicit BatchSampler(std::int64_t items, BatchSamplerOptions options = {});

  /// This rank's samples of step `step`, batch / world of them. ValueError for a negative step, here and in
  /// `set_step`.
  std::vector<std::int64_t> at(std::int64_t step) const;
  /// This rank's samples of the next step, from step 0.
  std::vector<std::int64_t> next() { return at(step_++); }
  /// The step that `next` gives: all there is to save, and to set again.
  std::int64_t step() const { return step_; }
  void set_step(std::int64_t step);
  const BatchSamplerOptions& options() const { return options_; }

 private:
  std::int64_t items_, step_ = 0;
  BatchSamplerOptions options_;
};

/// What an epoch does with samples that do not fill a batch.
enum class LastBatch { drop, keep };
/// For `EpochSampler`.
struct EpochSamplerOptions {
  std::int64_t batch = 1;  ///< samples a step, over all ranks
  std::uint64_t seed = 0;
  bool shuffle = true;  ///< each epoch in an order of its own, else 0, 1, ...
  LastBatch last = LastBatch::drop;
  int rank = 0, world = 1;  ///< this rank's part of each batch: the parts in rank order are the batch
};

/// Goes through all samples once an epoch. A batch depends on the options and its step alone, as with
/// `BatchSampler`: a run goes on from a saved step to the bit, in the middle of an epoch too.
class SHERD_API EpochSampler {
 public:
  /// ValueError as for `BatchSampler`, and for fewer items than a batch where the last one is dropped. A last
  /// batch that is kept is cut into parts as equal as can be, so of a small one some ranks get no sample, and
  /// a mean over none is NaN: such ranks skip the loss (`DataParallel::join`), or the last batch is dropped.
  explicit EpochSampler(std::int64_t items, EpochSamplerOptions options = {});

  std::int64_t steps_per_epoch() const;
  std::int64_t epoch() const { return step_ / steps_per_epoch(); }
  /// This rank's samples of step `step`, counted through all epochs. ValueError for a negative step.
  std::vector<std::int64_t> at(std::int64_t step) const;
  std::vector<std::int64_t> next() { return at(step_++); }
  std::int64_t step() const { return step_; }
  void set_step(std::int64_t step);
  const EpochSamplerOptions& options() const { return options_; }

 private:
  std::int64_t items_, step_ = 0;
  EpochSamplerOptions options_;
  mutable std::int64_t ordered_ = -1;  // the epoch whose order this is
  mutable std::vector<std::int64_t> order_;
};

/// Tokens and, at the same place, the token that follows each: (B, T) i64.
struct Batch {
  Tensor tokens, targets;
};

/// Batch of the windows text[start, start + context), with the byte after each of theirs as target: B is the
/// number of starts, T is `context`. ValueError for a context below 1, and for a window that with its last
/// target leaves the text.
SHERD_API Batch text_batch(std::span<const std::uint8_t> text, std::span<const std::int64_t> starts,
                           std::int64_t context);

}  // namespace sherd::nn
