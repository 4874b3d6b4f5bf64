// The tokens of a run that tunes a model: made once, beside the run, and read by all of its ranks.
#pragma once

#include <cstdint>
#include <string_view>

#include "nn/packing.h"
#include "runtime/io/file_system.h"
#include "tools/train_options.h"

namespace sherd::tools {

/// In a run's folder.
inline constexpr std::string_view tokens_name = "tokens.safetensors";

struct Tokens {
  nn::Packing train, validation;
  std::int64_t files = 0;
  std::uint64_t digest = 0;  ///< of the data and of what tokenises it
};

/// Of a run's data and its model's tokenizer. Errors are those of `nn::training_text_digest`.
std::uint64_t tokens_digest(const TrainOptions& options, FileSystem& files);
/// Tokenises the data. Errors as of `nn::read_training_text`; ValueError where a part has nothing to learn.
Tokens make_tokens(const TrainOptions& options, FileSystem& files);
/// Puts them into the run's folder `out`, durably.
void save_tokens(const Tokens& tokens, const FileSystem::Path& out, FileSystem& files);
/// Those in the run's folder. Errors as of `nn::load_training_text`.
Tokens load_tokens(const TrainOptions& options, std::uint64_t digest, const FileSystem::Path& out,
                   FileSystem& files);

}  // namespace sherd::tools
