#include "tools/run_folder.h"

#include <algorithm>
#include <charconv>

#include "runtime/error.h"
#include "runtime/io/durable.h"
#include "runtime/shown.h"
#include "tools/checkpoint.h"

namespace sherd::tools {
namespace {

using Path = FileSystem::Path;

void create_directories(const Path& path, FileSystem& files) {
  if (path.empty() || files.exists(path)) return;
  const Path parent = path.parent_path();
  create_directories(parent, files);
  try {
    files.create_directory(path);
  } catch (const FileError&) {
    if (!files.is_directory(path)) throw;  // else another run made it at the same time
  }
  files.sync_directory(parent.empty() ? "." : parent);
}

constexpr std::string_view runs = "runs";

Path named_folder(const TrainOptions& options) {
  const Path path = Path(options.out).lexically_normal();
  return path.has_filename() ? path : path.parent_path();
}

/// Of the folders in `runs/` that are named by a number; 0 where there is none.
std::int64_t newest_number(FileSystem& files) {
  std::int64_t newest = 0;
  if (!files.exists(runs)) return newest;
  for (const std::string& name : files.list(runs)) {
    std::int64_t number = 0;
    std::from_chars(name.data(), name.data() + name.size(), number);
    if (std::to_string(number) == name) newest = std::max(newest, number);
  }
  return newest;
}

/// Another run may be about to take the same number: who makes the folder has it.
Path create_next_folder(FileSystem& files) {
  create_directories(runs, files);
  for (std::int64_t number = newest_number(files) + 1;; ++number) {
    const Path path = Path(runs) / std::to_string(number);
    try {
      files.create_directory(path);
    } catch (const FileError&) {
      if (!files.exists(path)) throw;
      continue;
    }
    files.sync_directory(runs);
    return path;
  }
}

/// "process 4711"; it may have ended by now, or not have said yet who it is.
std::string holder_of(const Path& lock, FileSystem& files) {
  try {
    const std::string process = files.read(lock, 32);
    if (!process.empty()) return "process " + shown(process);
  } catch (const FileError&) {
  }
  return "another process";
}

}  // namespace

Path resumed_folder(const TrainOptions& options, FileSystem& files) {
  if (!options.out.empty()) return named_folder(options);
  const std::int64_t newest = newest_number(files);
  check<ValueError>(newest > 0, "--resume: there is no run in '{}'; name its folder with --out", runs);
  return Path(runs) / std::to_string(newest);
}

Path run_folder_to_make(const TrainOptions& options) {
  return options.out.empty() ? Path(runs) : named_folder(options);
}

bool has_number_of_run(const Path& path) {
  const Path way =
      std::filesystem::absolute(path).lexically_normal().lexically_relative(std::filesystem::absolute(runs));
  return !way.empty() && way.string().find_first_not_of("0123456789") == std::string::npos;
}

std::unique_ptr<FileLock> lock_run_folder(const Path& run, FileSystem& files) {
  const Path path = run / ".lock";
  std::unique_ptr<FileLock> lock = files.try_lock(path);
  if (!lock) {
    fail<StateError>(
        "--out '{}': {} is writing the run in this folder; wait for its end or name another folder",
        run.string(), holder_of(path, files));
  }
  return lock;
}

LockedFolder create_run_folder(const TrainOptions& options, FileSystem& files) {
  if (options.out.empty()) {
    const Path run = create_next_folder(files);
    return {run, lock_run_folder(run, files)};
  }
  const Path run = named_folder(options);
  create_directories(run, files);
  std::unique_ptr<FileLock> lock = lock_run_folder(run, files);
  check<ValueError>(!has_checkpoints(run, files) && !files.exists(run / "metrics.jsonl"),
                    "--out '{}': holds a run already; add --resume to go on with it, or name another folder",
                    run.string());
  return {run, std::move(lock)};
}

void require_run_folder(const Path& run, FileSystem& files) {
  check<ValueError>(files.exists(run), "--resume: there is no folder '{}'; name the run's with --out",
                    run.string());
}

std::int64_t newest_step(const Path& run, FileSystem& files) {
  recover_directory(run, files);
  const std::optional<std::int64_t> newest = newest_checkpoint(run, files);
  check<ValueError>(newest.has_value(), "--resume: '{}' holds no checkpoint; start the run without --resume",
                    run.string());
  return *newest;
}

}  // namespace sherd::tools
