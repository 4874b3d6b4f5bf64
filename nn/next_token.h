// Choosing the next token of a sequence by its logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "nn/generate.h"
#include "runtime/generator.h"

namespace sherd::nn {

/// How a sequence chooses: its options, and where its stream of random numbers has come to.
struct Chooser {
  const GenerateOptions* options;
  RandomKey* random;
};

/// How messages name options: as fields, or as the flags that programs have for them.
enum class OptionNames { fields, flags };
/// ValueError for options out of range.
SHERD_API void validate(const GenerateOptions& options, OptionNames names = OptionNames::fields);

/// The next token of each row of logits (B, vocab), f32 or f64, by the chooser of its own. StateError where a
/// row's largest logit is not finite, or one is NaN.
std::vector<std::int64_t> next_tokens(const Tensor& logits, std::span<const Chooser> choosers);

}  // namespace sherd::nn
