// Text from a trained model.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "nn/gpt.h"

namespace sherd::tools {

struct GenerateOptions {
  std::int64_t tokens = 200;  ///< bytes to generate
  double temperature = 0.8;   ///< divides the logits; 0 takes the likeliest byte
  std::int64_t top_k = 0;     ///< draws from the k likeliest bytes; 0 from all
  std::uint64_t seed = 0;
};

/// ValueError for options out of range.
void validate(const GenerateOptions& options);

/// Continues `prompt` (a zero byte where it is empty) byte by byte, giving each to `on_byte`. Keys and values
/// are kept; when they fill the context, the last half of it is read anew. Needs a model in eval mode; the
/// caller's generator stays as it is.
void generate(const nn::Gpt& model, std::string_view prompt, const GenerateOptions& options,
              const std::function<void(char)>& on_byte);

/// The same as text: what was generated, without the prompt.
std::string generate(const nn::Gpt& model, std::string_view prompt, const GenerateOptions& options);

/// Control characters other than newline and tab as '?': nothing that a terminal obeys.
std::string without_controls(std::string text);
/// The same, and bytes that are not UTF-8 as '?' too.
std::string printable(std::string text);

}  // namespace sherd::tools
