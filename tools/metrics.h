// metrics.jsonl: one line of JSON a step, without times, so that equal runs write equal files.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>

#include "runtime/io/file_system.h"

namespace sherd::tools {

/// Keeps the lines of the steps up to `step` in the file `path`, as they are; later ones, damaged ones and a
/// half line at the end go.
void cut_metrics(const FileSystem::Path& path, std::int64_t step, FileSystem& files);

/// The file, open at its end. What was added is written at once, so that others can follow the run.
class Metrics {
 public:
  Metrics(const FileSystem::Path& path, FileSystem& files) : file_(files.append(path)) {}
  void add(const nlohmann::ordered_json& line);
  /// Returns when all lines are on the disk.
  void sync() { file_->sync(); }

 private:
  std::unique_ptr<OutputFile> file_;
};

}  // namespace sherd::tools
