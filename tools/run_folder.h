// Where a run lives.
#pragma once

#include "runtime/io/file_system.h"
#include "tools/train_options.h"

namespace sherd::tools {

/// The folder of the run that is to go on: the one that `options` name, or the newest of `runs/`.
FileSystem::Path resumed_folder(const TrainOptions& options, FileSystem& files);

/// The folder that a new run makes: the one that `options` name, or `runs/`, in which it makes one.
FileSystem::Path run_folder_to_make(const TrainOptions& options);
/// Whether `path` is what may become the folder of a run without a name.
bool has_number_of_run(const FileSystem::Path& path);

/// Locks the folder for the one process that writes it. StateError that names the folder, and the process
/// that has it.
std::unique_ptr<FileLock> lock_run_folder(const FileSystem::Path& run, FileSystem& files);

struct LockedFolder {
  FileSystem::Path path;
  std::unique_ptr<FileLock> lock;
};
/// Makes the folder of a new run, with its parents, and locks it: the one that `options` name, ValueError
/// when it holds a run already, or the next number of `runs/`, which no other run gets.
LockedFolder create_run_folder(const TrainOptions& options, FileSystem& files);

/// ValueError where there is no such folder to go on in.
void require_run_folder(const FileSystem::Path& run, FileSystem& files);
/// The newest checkpoint of a run that is to go on, after clearing what a crash left. ValueError where there
/// is none. The folder is locked.
std::int64_t newest_step(const FileSystem::Path& run, FileSystem& files);

}  // namespace sherd::tools
