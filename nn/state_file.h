// State dicts in safetensors files.
#pragma once

#include "nn/module.h"
#include "runtime/io/safetensors.h"

namespace sherd::nn {

/// Writes a state dict into an open file.
SHERD_API void write_state(OutputFile& file, const StateDict& state, const TensorMetadata& metadata = {});
/// Writes a file that a crash leaves as it was.
SHERD_API void save_state(const FileSystem::Path& path, const StateDict& state,
                          const TensorMetadata& metadata = {}, FileSystem& files = posix_file_system());
/// Reads one tensor of an open file onto the CPU. ValueError or ShapeError for one that the library cannot
/// hold or that is damaged; the rest of the file is not looked at.
SHERD_API Tensor load_tensor(const SafetensorsFile& file, const TensorEntry& entry);
/// Reads all tensors of a file, PyTorch's too; ValueError or FileError name what is wrong.
SHERD_API StateDict load_state(const FileSystem::Path& path, FileSystem& files = posix_file_system());

}  // namespace sherd::nn
