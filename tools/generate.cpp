#include "tools/generate.h"

#include <algorithm>

#include "nn/generate.h"

namespace sherd::tools {
namespace {

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
  if (prompt.empty()) prompt = std::string_view("\0", 1);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(prompt.data());
  nn::generate(model, std::vector<std::int64_t>(bytes, bytes + prompt.size()),
               {.max_new_tokens = o.tokens, .temperature = o.temperature, .top_k = o.top_k, .seed = o.seed},
               [&](std::int64_t token) { on_byte(static_cast<char>(token)); });
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
