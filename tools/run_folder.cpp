#include "tools/run_folder.h"

#include "runtime/error.h"
#include "runtime/io/durable.h"
#include "tools/checkpoint.h"

namespace sherd::tools {
namespace {

using Path = FileSystem::Path;

void create_directories(const Path& path, FileSystem& files) {
  if (path.empty() || files.exists(path)) return;
  const Path parent = path.parent_path();
  create_directories(parent, files);
  files.create_directory(path);
  files.sync_directory(parent.empty() ? "." : parent);
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

void create_run_folder(const Path& run, FileSystem& files) {
  const bool taken = !saved_steps(run, files).empty() || files.exists(run / "metrics.jsonl");
  check<ValueError>(!taken,
                    "--out '{}': holds a run already; add --resume to go on with it, or name another folder",
                    run.string());
  create_directories(run, files);
}

std::int64_t newest_step(const Path& run, FileSystem& files) {
  check<ValueError>(files.exists(run), "--resume: there is no folder '{}'; name the run's with --out",
                    run.string());
  recover_directory(run, files);
  const std::vector<std::int64_t> steps = saved_steps(run, files);
  check<ValueError>(!steps.empty(), "--resume: '{}' holds no checkpoint; start the run without --resume",
                    run.string());
  return steps.back();
}

}  // namespace sherd::tools
