// What generating needs of a model, whatever its kind, and of the ranks that have parts of it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "collectives/group.h"
#include "nn/key_values.h"

namespace sherd::nn {

struct Gpt;
struct Llama;

/// A model that predicts tokens.
struct LanguageModel {
  explicit LanguageModel(const Gpt& model);
  explicit LanguageModel(const Llama& model);

  /// Logits (B, vocab) in f32 or f64 of what follows tokens (B, T), behind what the cache has.
  Tensor last_logits(std::span<const std::int64_t> tokens, std::int64_t rows, KeyValueCache& cache) const;
  /// A forward for the other ranks of a sharded model, which gather in theirs; nothing of a whole one.
  void idle() const;
  /// ValueError for an empty prompt, and tokens outside the vocabulary.
  void check_prompt(std::span<const std::int64_t> prompt) const;

  std::function<Tensor(const Tensor& tokens, KeyValueCache& cache)> forward;
  std::int64_t context, vocab;
  Device device;
  std::vector<Group> ranks;  ///< that share parameters, alike on all of them
};

/// Calls `step`, which runs the model once, as long as it is wanted on any rank. Where a rank's `begin` or
/// `step` throws, the others throw a StateError that names it, if they can still be told.
void run_on_all_ranks(const LanguageModel& model, const std::function<void()>& begin,
                      const std::function<bool()>& wanted, const std::function<void()>& step);

/// The largest of the ranks' numbers.
std::int64_t largest_of_ranks(const LanguageModel& model, std::int64_t mine);

}  // namespace sherd::nn
