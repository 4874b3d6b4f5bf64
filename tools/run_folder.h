// Where a run lives.
#pragma once

#include "runtime/io/file_system.h"
#include "tools/train_options.h"

namespace sherd::tools {

/// The folder that `options` name, or the one of `runs/` that is free (for a new run) or newest (with
/// `resume`).
FileSystem::Path run_folder(const TrainOptions& options, FileSystem& files);

/// Makes the folder of a new run, with its parents. ValueError when it holds a run already.
void create_run_folder(const FileSystem::Path& run, FileSystem& files);

/// The newest checkpoint of a run that is to go on, after clearing what a crash left. ValueError where there
/// is none.
std::int64_t newest_step(const FileSystem::Path& run, FileSystem& files);

}  // namespace sherd::tools
