// How well a language model predicts a text.
#pragma once

#include <cstdint>
#include <span>

#include "nn/llama.h"

namespace sherd::nn {

/// How a text is cut: windows of `context` tokens begin every `stride` tokens, the last one ends with the
/// text. Each scores those of its tokens that the one before has not, but never its own first, before which
/// it has none: with a stride below the context all but the first of the text are scored, each behind at
/// least context - stride others where there are so many.
struct PerplexityOptions {
  std::int64_t context = 0;  ///< 0 for the model's, up to 2048
  std::int64_t stride = 0;   ///< at most `context`; 0 for half of it
};

/// Sums over the tokens that were scored.
struct SHERD_API Perplexity {
  std::int64_t tokens = 0;
  double nats = 0;  ///< minus the sum of their log-probabilities
  double per_token() const { return nats / static_cast<double>(tokens); }
  /// e^(nats a token). NaN without tokens.
  double value() const;
  Perplexity& operator+=(const Perplexity& other);
};

/// Of `tokens` as one text, by a model in eval mode; losses in f32, sums in f64. Of a sharded model every
/// rank calls with a text of as many windows. ValueError for tokens outside the vocabulary, a stride or
/// context out of range, and one beyond the model's.
SHERD_API Perplexity perplexity(const Gpt& model, std::span<const std::int64_t> tokens,
                                const PerplexityOptions& options = {});
SHERD_API Perplexity perplexity(const Llama& model, std::span<const std::int64_t> tokens,
                                const PerplexityOptions& options = {});

}  // namespace sherd::nn
