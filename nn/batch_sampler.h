// Which samples a step trains on, and batches of text made from them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/tensor.h"

namespace sherd::nn {

struct BatchSamplerOptions {
  std::int64_t batch = 1;  ///< samples a step, over all ranks
  std::uint64_t seed = 0;
  int rank = 0, world = 1;  ///< which part of each batch is ours: the ranks' parts, in order, are the batch
};

/// Draws samples with replacement, uniformly from [0, items). A batch depends on the options and its step
/// alone, so the step is all there is to save, and every number of ranks trains on the same batches.
class SHERD_API BatchSampler {
 public:
  /// ValueError without items, for a rank outside the world, and for a batch that does not divide by the
  /// world.
  explicit BatchSampler(std::int64_t items, BatchSamplerOptions options = {});

  /// This rank's samples of step `step`, batch / world of them.
  std::vector<std::int64_t> at(std::int64_t step) const;
  /// This rank's samples of the next step, from step 0.
  std::vector<std::int64_t> next() { return at(step_++); }
  /// The state to save and to set again: the step that `next` gives.
  std::int64_t step() const { return step_; }
  void set_step(std::int64_t step);

 private:
  std::int64_t items_, step_ = 0;
  BatchSamplerOptions options_;
};

/// Inputs and what should follow them, (B, T) i64 each.
struct Batch {
  Tensor tokens, targets;
};

/// Windows text[start, start + context) and the bytes after each of theirs. ValueError when one leaves the
/// text.
SHERD_API Batch text_batch(std::span<const std::uint8_t> text, std::span<const std::int64_t> starts,
                           std::int64_t context);

}  // namespace sherd::nn
