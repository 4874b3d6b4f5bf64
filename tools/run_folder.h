// Where a run lives.
#pragma once

#include "runtime/io/file_system.h"
#include "tools/train_options.h"

namespace sherd::tools {

/// The folder that `options` name, or the one of `runs/` that is free (for a new run) or newest (with
/// `resume`).
FileSystem::Path run_folder(const TrainOptions& options, FileSystem& files);

/// Locks the folder for the one process that writes it. StateError that names the folder, and the process
/// that has it.
std::unique_ptr<FileLock> lock_run_folder(const FileSystem::Path& run, FileSystem& files);

/// Makes the folder of a new run, with its parents, and locks it. ValueError when it holds a run already.
std::unique_ptr<FileLock> create_run_folder(const FileSystem::Path& run, FileSystem& files);

/// ValueError where there is no such folder to go on in.
void require_run_folder(const FileSystem::Path& run, FileSystem& files);
/// The newest checkpoint of a run that is to go on, after clearing what a crash left. ValueError where there
/// is none. The folder is locked.
std::int64_t newest_step(const FileSystem::Path& run, FileSystem& files);

}  // namespace sherd::tools
