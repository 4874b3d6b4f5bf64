#include "nn/generate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/context.h"

namespace sherd::nn {
namespace {

/// Gives the rank's generator a seed of its own for a while.
class SeedScope {
 public:
  explicit SeedScope(std::uint64_t seed) : before_(Context::current().generator().state()) {
    Context::current().generator().set_state({.seed = seed});
  }
  ~SeedScope() { Context::current().generator().set_state(before_); }
  SeedScope(const SeedScope&) = delete;
  SeedScope& operator=(const SeedScope&) = delete;

 private:
  RandomKey before_;
};

void validate(const GenerateOptions& o) {
  check<ValueError>(o.max_new_tokens >= 0, "generate: max_new_tokens {} is below 0", o.max_new_tokens);
  check<ValueError>(o.temperature >= 0 && o.temperature <= 1e6,
                    "generate: temperature {}, it takes values from 0 to 1e6", o.temperature);
  check<ValueError>(o.top_k >= 0, "generate: top_k {} is below 0; 0 draws from all tokens", o.top_k);
  check<ValueError>(o.top_p > 0 && o.top_p <= 1, "generate: top_p {}, it takes values above 0 to 1", o.top_p);
}

/// Draws a token from logits (1, vocab).
std::int64_t draw(const Tensor& logits, const GenerateOptions& o) {
  const TopK likely = topk(logits, o.top_k > 0 ? std::min(o.top_k, logits.size(-1)) : logits.size(-1));
  const Tensor best = narrow(likely.values, -1, 0, 1);
  check<StateError>(std::isfinite(best.item()),
                    "generate: the model's largest logit is {}; its weights are of no use", best.item());
  // What is smaller counts as zero in f32, and draws the likeliest token anyway.
  if (o.temperature < std::numeric_limits<float>::min()) return argmax(logits, -1).item<std::int64_t>();
  // Less than zero may divide to minus infinity, and is then never drawn.
  Tensor chances = softmax(div(sub(likely.values, best), o.temperature));
  // Out are those before which the likelier ones are together `top_p` likely; before the first is nothing.
  if (o.top_p < 1) chances = where(sub(cumsum(chances, -1), chances) < o.top_p, chances, 0.0);
  return gather(likely.indices, unsqueeze(multinomial(chances), -1)).item<std::int64_t>();
}

/// Reads tokens and gives the logits of what follows them.
template <class Model>
class Reader {
 public:
  Reader(const Model& model, std::int64_t context)
      : model_(model),
        device_(model.parameters().front().local().device()),
        context_(static_cast<std::size_t>(context)) {}

  /// (1, vocab) in f32 or f64, of the tokens of `all` from `read` on.
  Tensor read(std::span<const std::int64_t> all, std::size_t read) {
    std::span<const std::int64_t> newest = all.subspan(read);
    if (cached_ + newest.size() > context_) {
      cache_.clear();
      cached_ = 0;
      newest = all.last(std::min(all.size(), std::max<std::size_t>(context_ / 2, 1)));
    }
    cached_ += newest.size();
    const auto count = static_cast<std::int64_t>(newest.size());
    const std::vector<std::int64_t> tokens(newest.begin(), newest.end());
    const Tensor logits =
        model_.forward(to(Tensor::from(tokens, {1, count}, Device::cpu()), device_), cache_);
    return to(select(logits, 1, count - 1), compute_dtype(logits.dtype()));
  }

 private:
  const Model& model_;
  Device device_;
  std::size_t context_;
  KeyValueCache cache_;
  std::size_t cached_ = 0;
};

template <class Model>
std::vector<std::int64_t> continued(const Model& model, std::int64_t context,
                                    std::span<const std::int64_t> prompt, const GenerateOptions& o,
                                    const OnToken& on_token) {
  validate(o);
  check<ValueError>(!prompt.empty(), "generate: the prompt is empty; give it one token at least");
  const NoGrad guard;
  const SeedScope seeded(o.seed);
  Reader<Model> reader(model, context);
  std::vector<std::int64_t> all(prompt.begin(), prompt.end());
  std::size_t read = 0;
  for (std::int64_t i = 0; i < o.max_new_tokens; ++i) {
    const Tensor logits = reader.read(all, read);
    read = all.size();
    all.push_back(draw(logits, o));
    if (on_token) on_token(all.back());
    if (std::ranges::find(o.stop_tokens, all.back()) != o.stop_tokens.end()) break;
  }
  return {all.begin() + static_cast<std::ptrdiff_t>(prompt.size()), all.end()};
}

}  // namespace

std::vector<std::int64_t> generate(const Gpt& model, std::span<const std::int64_t> prompt,
                                   const GenerateOptions& options, const OnToken& on_token) {
  return continued(model, model.options.context, prompt, options, on_token);
}
std::vector<std::int64_t> generate(const Llama& model, std::span<const std::int64_t> prompt,
                                   const GenerateOptions& options, const OnToken& on_token) {
  return continued(model, model.options.context(), prompt, options, on_token);
}

}  // namespace sherd::nn
