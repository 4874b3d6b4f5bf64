// Checkpoints as one file, in Hugging Face's format, and back, by whoever has the files: without a model and
// without other ranks, one tensor at a time in memory.
//
//   shard::merge_checkpoint("runs/7/step-100", "model.safetensors");
//   nn::save_pretrained(shard::checkpoint_tensors("runs/7/step-100").tensors, "mine", {.config_from =
//   "TinyLlama"}); shard::split_checkpoint({{"model", {nn::pretrained_tensors("mine")}}}, "step-0", 4);
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "runtime/io/safetensors.h"
#include "shard/checkpoint.h"

namespace sherd::shard {

/// What is taken of a checkpoint.
struct CheckpointTensorsOptions {
  std::string part = "model";
  /// Of what several groups of ranks saved each, in meshes of two dimensions, the one of that group, from 0.
  std::optional<int> group{};
  FileSystem& files = posix_file_system();
};

/// Whole tensors, which may be read when they are asked for, and what a file of them notes.
struct WholeTensors {
  std::vector<TensorRecord> tensors;
  TensorMetadata notes{};
  int groups = 1;  ///< of ranks in the checkpoint, of which each has tensors of its own
};

/// Those of a checkpoint that any ranks saved, or of one file of whole tensors, by name. Errors as
/// `load_checkpoint`; ValueError where a group is to be named.
SHERD_API WholeTensors checkpoint_tensors(const FileSystem::Path& from,
                                          const CheckpointTensorsOptions& options = {});

/// Writes them as one file, as one rank saves it: for other programs. One tensor is held at a time, and read
/// twice. The file is the old one or the complete new one whatever happens. Errors as above and of
/// `save_safetensors`; ValueError for a file of the checkpoint itself.
SHERD_API void merge_checkpoint(const FileSystem::Path& from, const FileSystem::Path& file,
                                const CheckpointTensorsOptions& options = {});

/// A part of a checkpoint to write.
struct NamedTensors {
  std::string part;  ///< "model" or "optimizer" for `load_checkpoint`
  WholeTensors whole;
};
/// Writes the checkpoint that `ranks` ranks would save of the layout `per_parameter`, for any ranks to load;
/// of one rank whole tensors. One tensor is held at a time, with the rows that one rank has of it, and read
/// twice for each rank. The folder is the old one or the complete new one whatever happens. ValueError for
/// fewer ranks than one and for names that are no parts'; other errors are those of reading and
/// `write_directory_durably`.
SHERD_API void split_checkpoint(const std::vector<NamedTensors>& parts, const FileSystem::Path& folder,
                                int ranks, FileSystem& files = posix_file_system());

}  // namespace sherd::shard
