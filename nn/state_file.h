// State dicts in safetensors files.
#pragma once

#include "nn/module.h"
#include "runtime/io/safetensors.h"

namespace sherd::nn {

/// Writes a state dict into an open file, in the safetensors format. Errors as `write_safetensors`, and
/// FileError.
SHERD_API void write_state(OutputFile& file, const StateDict& state, const TensorMetadata& metadata = {});
/// The same into the file `path`, durably: after a crash or an error it is the old file or the complete new
/// one. StateError for the state of a sharded module, which is one rank's part of it.
SHERD_API void save_state(const FileSystem::Path& path, const StateDict& state,
                          const TensorMetadata& metadata = {}, FileSystem& files = posix_file_system());
/// Reads one tensor of an open file onto the CPU and nothing else of the file. ShapeError for more than eight
/// dimensions, ValueError for a dtype that the library lacks and for damaged values, FileError.
SHERD_API Tensor load_tensor(const SafetensorsFile& file, const TensorEntry& entry);
/// Why no tensor of the library can hold that one, though it is sound; empty where one can.
std::string why_unread(const SafetensorsFile& file, const TensorEntry& entry);
/// Reads all tensors of a safetensors file onto the CPU, PyTorch's too. Those of a dtype that the library
/// lacks are left out, with a line in the log, and are refused by name when they are asked for
/// (`StateDict::unread`). Errors as `SafetensorsFile` and `load_tensor`.
SHERD_API StateDict load_state(const FileSystem::Path& path, FileSystem& files = posix_file_system());

}  // namespace sherd::nn
