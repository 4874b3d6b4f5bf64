#include "nn/perplexity.h"

#include <algorithm>
#include <cmath>

#include "runtime/context.h"
#include "runtime/error.h"
#include "runtime/losses.h"
#include "runtime/ops.h"

namespace sherd::nn {
namespace {

/// What the last `scored` tokens of a window cost, whose first has none before it.
template <class Model>
double cost_of(const Model& model, std::span<const std::int64_t> window, std::int64_t scored) {
  const Device device = model.parameters().front().local().device();
  const std::int64_t before = std::ssize(window) - 1;
  const Tensor tokens = to(Tensor::from(window, {1, before + 1}, Device::cpu()), device);
  const Tensor logits = select(model(narrow(tokens, 1, 0, before)), 0, 0);
  const Tensor targets = select(tokens, 0, 0);
  return cross_entropy(narrow(logits, 0, before - scored, scored),
                       narrow(targets, 0, before + 1 - scored, scored),
                       {.reduction = Reduction::sum, .precision = LossPrecision::wide})
      .item();
}

template <class Model>
Perplexity measured(const Model& model, std::int64_t most, std::int64_t vocab,
                    std::span<const std::int64_t> tokens, const PerplexityOptions& o) {
  const std::int64_t context = o.context == 0 ? std::min<std::int64_t>(most, 2048) : o.context;
  check<ValueError>(context >= 2 && context <= most,
                    "perplexity: context {}, it takes values from 2 to {}, of the model", context, most);
  const std::int64_t stride = o.stride == 0 ? (context + 1) / 2 : o.stride;
  check<ValueError>(stride >= 1 && stride <= context,
                    "perplexity: stride {}, it takes values from 1 to the context of {}", stride, context);
  for (const std::int64_t token : tokens)
    check<ValueError>(token >= 0 && token < vocab, "perplexity: token {} is outside the vocabulary of {}",
                      token, vocab);
  const NoGrad guard;
  Perplexity sum;
  const std::int64_t size = std::ssize(tokens);
  for (std::int64_t begin = 0, scored_to = 0; scored_to < size; begin += stride) {
    const std::int64_t end = std::min(begin + context, size);
    const std::int64_t scored = end - std::max(scored_to, begin + 1);
    if (scored > 0) {
      sum.nats += cost_of(
          model, tokens.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)),
          scored);
      sum.tokens += scored;
    }
    scored_to = end;
  }
  return sum;
}

}  // namespace

double Perplexity::value() const { return std::exp(per_token()); }
Perplexity& Perplexity::operator+=(const Perplexity& other) {
  tokens += other.tokens, nats += other.nats;
  return *this;
}

Perplexity perplexity(const Gpt& model, std::span<const std::int64_t> tokens,
                      const PerplexityOptions& options) {
  return measured(model, model.options.context, model.options.vocab, tokens, options);
}
Perplexity perplexity(const Llama& model, std::span<const std::int64_t> tokens,
                      const PerplexityOptions& options) {
  return measured(model, model.options.context(), model.options.vocab_size, tokens, options);
}

}  // namespace sherd::nn
