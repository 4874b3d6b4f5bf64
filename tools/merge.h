// `sherd merge`: what any ranks saved, as one file.
#pragma once

#include <string>

#include "runtime/io/file_system.h"

namespace sherd::tools {

struct MergeOptions {
  std::string checkpoint;      ///< its folder, or a run's, whose newest one is taken
  std::string part = "model";  ///< what the checkpoint has files of: model, optimizer
  std::string out;             ///< the file; none: PART.safetensors
};

/// Writes the part as whole tensors, one at a time, and says where and of which checkpoint. Errors name the
/// flag or the file.
std::string merge(const MergeOptions& options, FileSystem& files);

}  // namespace sherd::tools
