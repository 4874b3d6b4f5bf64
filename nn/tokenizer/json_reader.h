// tokenizer.json to the parts of a tokenizer.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "nn/tokenizer/pipeline.h"

namespace sherd::nn::tokens {

constexpr std::uint64_t largest_json = std::uint64_t{36} << 20;  // bytes; the largest known has 33 MiB

/// ValueError, which begins with `where`, names what is not supported; NotImplementedError what this build
/// lacks.
std::unique_ptr<Pipeline> read_json(std::string text, const std::string& where);

}  // namespace sherd::nn::tokens
