// `sherd merge` and `sherd split`: what any ranks saved as one file or a folder of Hugging Face's, and back.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "runtime/io/file_system.h"

namespace sherd::tools {

struct MergeOptions {
  std::string checkpoint;      ///< its folder, or a run's, whose newest one is taken, or a file of tensors
  std::string part = "model";  ///< what the checkpoint has files of: model, optimizer
  std::string out;             ///< the file or folder; none: PART.safetensors, or "pretrained"
  bool pretrained = false;     ///< a folder in Hugging Face's format in place of a file
  std::string config_from;     ///< a folder whose config.json says of what model it is; none: a run's
  std::uint64_t max_shard_size = 5'000'000'000;  ///< bytes of tensors in one of its files
  std::optional<int> group{};                    ///< whose tensors, where groups of ranks have their own
};

/// Writes the part as whole tensors, one at a time, and says where and of which checkpoint. Errors name the
/// flag or the file.
std::string merge(const MergeOptions& options, FileSystem& files);

struct SplitOptions {
  std::string from;  ///< a folder in Hugging Face's format, a file of whole tensors, or as `checkpoint`
  std::string out;   ///< the checkpoint's folder, which is not there yet
  int ranks = 0;
  std::optional<int> group{};  ///< whose tensors, where groups of ranks have their own
};

/// Writes the model, and the optimizer of a checkpoint that has one, as the checkpoint of so many ranks, a
/// tensor at a time, and says so. Errors name the flag or the file.
std::string split(const SplitOptions& options, FileSystem& files);

}  // namespace sherd::tools
