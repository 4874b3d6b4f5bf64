#include "nn/next_token.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "runtime/context.h"
#include "runtime/error.h"
#include "runtime/ops.h"
#include "runtime/random.h"

namespace sherd::nn {
namespace {

/// A smaller temperature counts as zero in f32, and draws the likeliest token anyway.
bool is_greedy(const GenerateOptions& o) {
  return o.temperature < std::numeric_limits<float>::min() || o.top_k == 1;
}

void check_largest(double logit) {
  check<StateError>(std::isfinite(logit),
                    "generate: the model's largest logit is {}; its weights are of no use", logit);
}

/// The largest, or NaN if there is one, and the first place where it is.
std::size_t place_of_largest(std::span<const double> logits) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < logits.size() && !std::isnan(logits[best]); ++i)
    if (!(logits[i] <= logits[best])) best = i;
  return best;
}

double next_uniform(RandomKey& random) { return uniform_numbers(random.seed, random.offset++)[0]; }

/// The places of logits, the likeliest `count` first and in order, equal ones by place.
void put_first(std::vector<std::int64_t>& places, std::size_t count, std::span<const double> logits) {
  const auto likelier = [&](std::int64_t a, std::int64_t b) {
    const double x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  };
  std::ranges::partial_sort(places, places.begin() + static_cast<std::ptrdiff_t>(count), likelier);
}

/// One of the tokens in `places`, with the chances `weights`.
std::int64_t drawn(std::span<const std::int64_t> places, std::span<const double> weights, double total,
                   RandomKey& random) {
  const double mark = next_uniform(random) * total;
  double sum = 0;
  std::size_t last = 0;  // that has a chance: rounding may leave the mark at the end
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (weights[i] == 0) continue;
    sum += weights[i], last = i;
    if (sum > mark) break;
  }
  return places[last];
}

std::int64_t choose(std::span<const double> logits, const Chooser& chooser) {
  const GenerateOptions& o = *chooser.options;
  const std::size_t top = place_of_largest(logits);
  check_largest(logits[top]);
  if (is_greedy(o)) return static_cast<std::int64_t>(top);
  std::vector<std::int64_t> places(logits.size());
  std::iota(places.begin(), places.end(), 0);
  const auto weight = [&](std::int64_t i) {
    return std::exp((logits[static_cast<std::size_t>(i)] - logits[top]) / o.temperature);
  };
  if (o.top_k > 0 && static_cast<std::size_t>(o.top_k) < places.size()) {
    put_first(places, static_cast<std::size_t>(o.top_k), logits);
    places.resize(static_cast<std::size_t>(o.top_k));
  }
  std::vector<double> weights(places.size());
  std::ranges::transform(places, weights.begin(), weight);
  double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  if (o.top_p < 1) {
    // Out are those before which the likelier ones are together `top_p` likely; few are in, as a rule.
    double sum = 0;
    for (std::size_t in = 0, sorted = 0; in < places.size(); ++in) {
      if (in == sorted) {
        sorted = std::min(places.size(), std::max<std::size_t>(64, 8 * sorted));
        put_first(places, sorted, logits);
      }
      if (sum >= o.top_p * total) {
        places.resize(in);
        break;
      }
      weights[in] = weight(places[in]);
      sum += weights[in];
    }
    weights.resize(places.size());
    total = sum;
  }
  return drawn(places, weights, total, *chooser.random);
}

}  // namespace

void validate(const GenerateOptions& o, OptionNames names) {
  constexpr std::int64_t most = 1 << 30;
  const bool flags = names == OptionNames::flags;
  const auto within = [&](bool is, std::string_view field, std::string_view flag, const auto& value,
                          const std::string& range) {
    check<ValueError>(is, "{} {}: takes values {}", flags ? flag : field, value, range);
  };
  within(o.max_new_tokens >= 0 && o.max_new_tokens <= most, "generate: max_new_tokens", "--tokens",
         o.max_new_tokens, fmt::format("from 0 to {}", most));
  within(o.temperature >= 0 && o.temperature <= 1e6, "generate: temperature", "--temperature", o.temperature,
         "from 0 to 1e6");
  within(o.top_k >= 0 && o.top_k <= most, "generate: top_k", "--top-k", o.top_k,
         fmt::format("from 0 to {}; 0 draws from all", most));
  within(o.top_p > 0 && o.top_p <= 1, "generate: top_p", "--top-p", o.top_p, "above 0, up to 1");
}

std::vector<std::int64_t> next_tokens(const Tensor& logits, std::span<const Chooser> choosers) {
  const NoGrad guard;
  if (std::ranges::all_of(choosers, [](const Chooser& c) { return is_greedy(*c.options); })) {
    for (const double largest : to(amax(logits, {-1}), DType::f64).to_vector<double>())
      check_largest(largest);
    return argmax(logits, -1).to_vector<std::int64_t>();
  }
  const std::vector<double> all = to(logits, DType::f64).to_vector<double>();
  const auto vocab = static_cast<std::size_t>(logits.size(-1));
  std::vector<std::int64_t> tokens;
  for (std::size_t row = 0; row < choosers.size(); ++row)
    tokens.push_back(choose(std::span(all).subspan(row * vocab, vocab), choosers[row]));
  return tokens;
}

}  // namespace sherd::nn
