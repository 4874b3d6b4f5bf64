// SentencePiece's tokenizer.model to the parts of a tokenizer.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "nn/tokenizer/pipeline.h"

namespace sherd::nn::tokens {

constexpr std::uint64_t largest_model = std::uint64_t{16} << 20;  // bytes; the largest known has 4.5 MiB

/// ValueError, which begins with `where`, names what is not supported.
std::unique_ptr<Pipeline> read_sentence_pieces(std::string_view file, const std::string& where);

}  // namespace sherd::nn::tokens
