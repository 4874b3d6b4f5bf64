// config.json of Hugging Face's models, read and written.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "nn/llama.h"
#include "runtime/io/file_system.h"

namespace sherd::nn::pretrained {

/// The object in a JSON file. ValueError names the file, also where it holds something else, is nested deeply
/// or above 16 MiB; FileError.
nlohmann::json read_object(const FileSystem::Path& file, FileSystem& files,
                           std::uint64_t most_bytes = std::uint64_t{1} << 21);

/// What is written for such a model with parameters of this dtype; what `from`, another config.json of its
/// type, has beside that stays.
nlohmann::json config_of(const GptOptions& options, DType dtype, nlohmann::json from);
nlohmann::json config_of(const LlamaOptions& options, DType dtype, nlohmann::json from);

/// Rows and columns of a matrix of 8-bit floats that share a scale, as the folder's config.json says.
std::pair<std::int64_t, std::int64_t> scale_block(const FileSystem::Path& folder, FileSystem& files);

}  // namespace sherd::nn::pretrained
