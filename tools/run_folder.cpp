#include "tools/run_folder.h"

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

Path run_folder(const TrainOptions& options, FileSystem& files) {
  if (!options.out.empty()) {
    const Path path = Path(options.out).lexically_normal();
    return path.has_filename() ? path : path.parent_path();
  }
  const Path runs = "runs";
  int next = 1;
  while (files.exists(runs / std::to_string(next))) ++next;
  check<ValueError>(!options.resume || next > 1,
                    "--resume: there is no run in '{}'; name its folder with --out", runs.string());
  return runs / std::to_string(options.resume ? next - 1 : next);
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

std::unique_ptr<FileLock> create_run_folder(const Path& run, FileSystem& files) {
  create_directories(run, files);
  std::unique_ptr<FileLock> lock = lock_run_folder(run, files);
  const bool taken = !saved_steps(run, files).empty() || files.exists(run / "metrics.jsonl");
  check<ValueError>(!taken,
                    "--out '{}': holds a run already; add --resume to go on with it, or name another folder",
                    run.string());
  return lock;
}

void require_run_folder(const Path& run, FileSystem& files) {
  check<ValueError>(files.exists(run), "--resume: there is no folder '{}'; name the run's with --out",
                    run.string());
}

std::int64_t newest_step(const Path& run, FileSystem& files) {
  recover_directory(run, files);
  const std::vector<std::int64_t> steps = saved_steps(run, files);
  check<ValueError>(!steps.empty(), "--resume: '{}' holds no checkpoint; start the run without --resume",
                    run.string());
  return steps.back();
}

}  // namespace sherd::tools
