// `sherd sample`: text from a checkpoint.
#pragma once

#include <functional>
#include <string>

#include "runtime/io/file_system.h"
#include "tools/generate.h"

namespace sherd::tools {

struct SampleOptions {
  std::string checkpoint;  ///< a checkpoint's folder, or a run's: then its best checkpoint
  std::string prompt;
  std::string device = "cpu";  ///< where it is computed: cpu or cuda
  GenerateOptions generate;
};

/// The folder that `path` names. FileError or ValueError where there is no checkpoint.
FileSystem::Path find_checkpoint(const FileSystem::Path& path, FileSystem& files);

/// Gives the bytes that follow the prompt, one by one.
void sample(const SampleOptions& options, FileSystem& files, const std::function<void(char)>& on_byte);

}  // namespace sherd::tools
