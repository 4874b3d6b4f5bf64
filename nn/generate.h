// Continuing a sequence of tokens with a language model.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "nn/llama.h"

namespace sherd::nn {

/// How the next token is chosen: of the `top_k` likeliest ones (0: of all), of these the fewest that are
/// together at least `top_p` likely, one is drawn.
struct GenerateOptions {
  std::int64_t max_new_tokens = 20;
  double temperature = 1;                   ///< divides the logits; 0 takes the likeliest token
  std::int64_t top_k = 0;                   ///< 0 for all
  double top_p = 1;                         ///< above 0, at most 1
  std::vector<std::int64_t> stop_tokens{};  ///< the sequence ends behind one of these
  std::uint64_t seed = 0;                   ///< the caller's generator stays as it is
};

/// Called with each token as soon as it is chosen.
using OnToken = std::function<void(std::int64_t)>;

/// The tokens that follow `prompt`, without it. Keys and values are kept; when they fill the model's context,
/// the last half of it is read anew. For a model in eval mode. ValueError for an empty prompt, for tokens
/// outside the vocabulary and options out of range; StateError for logits that are not finite.
SHERD_API std::vector<std::int64_t> generate(const Gpt& model, std::span<const std::int64_t> prompt,
                                             const GenerateOptions& options = {},
                                             const OnToken& on_token = {});
SHERD_API std::vector<std::int64_t> generate(const Llama& model, std::span<const std::int64_t> prompt,
                                             const GenerateOptions& options = {},
                                             const OnToken& on_token = {});

}  // namespace sherd::nn
