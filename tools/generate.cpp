#include "tools/generate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/context.h"
#include "runtime/ops.h"

namespace sherd::tools {
namespace {

/// Gives the rank's generator a seed of its own for a while.
class SeedScope {
 public:
  explicit SeedScope(std::uint64_t seed) : before_(Context::current().generator().state()) {
    manual_seed(seed);
  }
  ~SeedScope() { Context::current().generator().set_state(before_); }
  SeedScope(const SeedScope&) = delete;
  SeedScope& operator=(const SeedScope&) = delete;

 private:
  RandomKey before_;
};

/// Draws a byte from logits (1, 256).
std::int64_t draw(const Tensor& logits, const GenerateOptions& o) {
  const TopK likely = topk(logits, o.top_k > 0 ? std::min(o.top_k, logits.size(-1)) : logits.size(-1));
  const Tensor best = narrow(likely.values, -1, 0, 1);
  check<StateError>(std::isfinite(best.item()),
                    "sample: the model's largest logit is {}; its weights are of no use", best.item());
  // What is smaller counts as zero in f32, and draws the likeliest byte anyway.
  if (o.temperature < std::numeric_limits<float>::min()) return argmax(logits, -1).item<std::int64_t>();
  // Less than zero may divide to minus infinity, and is then never drawn.
  const Tensor chances = softmax(div(sub(likely.values, best), o.temperature));
  return gather(likely.indices, unsqueeze(multinomial(chances), -1)).item<std::int64_t>();
}

/// Reads text and gives the logits of what follows it.
class Reader {
 public:
  explicit Reader(const nn::Gpt& model)
      : model_(model), device_(model.parameters().front().local().device()) {}

  Tensor read(std::string_view newest, const std::string& all) {
    const auto context = static_cast<std::size_t>(model_.options.context);
    if (cached_ + newest.size() > context) {
      cache_.clear();
      cached_ = 0;
      newest = all;
      newest.remove_prefix(all.size() - std::min(all.size(), std::max<std::size_t>(context / 2, 1)));
    }
    cached_ += newest.size();
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(newest.data());
    const std::vector<std::int64_t> tokens(bytes, bytes + newest.size());
    const auto count = static_cast<std::int64_t>(tokens.size());
    return select(model_.forward(to(Tensor::from(tokens, {1, count}), device_), cache_), 1, count - 1);
  }

 private:
  const nn::Gpt& model_;
  Device device_;
  nn::KeyValueCache cache_;
  std::size_t cached_ = 0;
};

/// Bytes of the UTF-8 character that `text` begins with; 0 where it begins with none.
std::size_t character_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t length = first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
  if (length == 0 || length > text.size()) return 0;
  // Some second bytes would spell a character that has a shorter form, half of a pair, or none at all.
  const unsigned char least = first == 0xe0   ? 0xa0
                              : first == 0xf0 ? 0x90
                                              : 0x80,
                      most = first == 0xed   ? 0x9f
                             : first == 0xf4 ? 0x8f
                                             : 0xbf;
  if (byte(1) < least || byte(1) > most) return 0;
  for (std::size_t i = 2; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  return length;
}

}  // namespace

void validate(const GenerateOptions& o) {
  check<ValueError>(o.tokens >= 0 && o.tokens <= 1 << 30, "--tokens {}: takes values from 0 to {}", o.tokens,
                    1 << 30);
  check<ValueError>(o.temperature >= 0 && o.temperature <= 1e6,
                    "--temperature {}: takes values from 0 to 1e6", o.temperature);
  check<ValueError>(o.top_k >= 0 && o.top_k <= 1 << 30,
                    "--top-k {}: takes values from 0 to {}; 0 draws from all bytes", o.top_k, 1 << 30);
}

void generate(const nn::Gpt& model, std::string_view prompt, const GenerateOptions& o,
              const std::function<void(char)>& on_byte) {
  validate(o);
  const NoGrad guard;
  const SeedScope seeded(o.seed);
  Reader reader(model);
  std::string all(prompt);
  if (all.empty()) all.push_back('\0');
  std::size_t read = 0;
  for (std::int64_t i = 0; i < o.tokens; ++i) {
    const Tensor logits = reader.read(std::string_view(all).substr(read), all);
    read = all.size();
    all.push_back(static_cast<char>(draw(logits, o)));
    on_byte(all.back());
  }
}

std::string generate(const nn::Gpt& model, std::string_view prompt, const GenerateOptions& options) {
  std::string text;
  generate(model, prompt, options, [&](char byte) { text.push_back(byte); });
  return text;
}

std::string without_controls(std::string text) {
  std::ranges::replace_if(
      text, [](unsigned char c) { return (c < 0x20 && c != '\n' && c != '\t') || c == 0x7f; }, '?');
  return text;
}

std::string printable(std::string text) {
  text = without_controls(std::move(text));
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = character_length(std::string_view(text).substr(i));
    if (length == 0) text[i] = '?';
    i += std::max<std::size_t>(length, 1);
  }
  return text;
}

}  // namespace sherd::tools
