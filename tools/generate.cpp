#include "tools/generate.h"

#include <algorithm>

#include "nn/next_token.h"
#include "nn/tokenizer/utf8.h"

namespace sherd::tools {
namespace {

nn::GenerateOptions drawing(const GenerateOptions& o) {
  return {.max_new_tokens = o.tokens, .temperature = o.temperature, .top_k = o.top_k, .seed = o.seed};
}

}  // namespace

void validate(const GenerateOptions& o) { nn::validate(drawing(o), nn::OptionNames::flags); }

void generate(const nn::Gpt& model, std::string_view prompt, const GenerateOptions& o,
              const std::function<void(char)>& on_byte) {
  validate(o);
  if (prompt.empty()) prompt = std::string_view("\0", 1);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(prompt.data());
  nn::generate(model, std::vector<std::int64_t>(bytes, bytes + prompt.size()), drawing(o),
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
  for (std::size_t at = 0; (at += nn::tokens::sound_prefix(std::string_view(text).substr(at))) < text.size();)
    text[at++] = '?';
  return text;
}

}  // namespace sherd::tools
