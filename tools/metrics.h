// metrics.jsonl: one line of JSON a step, without times, so that equal runs write equal files. speed.jsonl
// beside it: how fast each step was, and what it took.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "runtime/io/file_system.h"

namespace sherd::tools {

inline constexpr std::string_view metrics_name = "metrics.jsonl", speed_name = "speed.jsonl";

/// Keeps the lines of the steps up to `step` that have an entry `must`, as they are; later ones, damaged ones
/// and a half line at the end go.
void cut_metrics(const FileSystem::Path& path, std::int64_t step, FileSystem& files,
                 const std::string& must = "loss");

/// Calls `on` with each line of the file that has an end, without it; an overlong one, which is damage, as an
/// empty line. Of a file of any size little is in memory.
void each_line(const FileSystem::Path& path, FileSystem& files,
               const std::function<void(std::string_view)>& on);

/// The file, open at its end. What was added is written at once, so that others can follow the run.
class Metrics {
 public:
  Metrics(const FileSystem::Path& path, FileSystem& files);
  void add(const nlohmann::ordered_json& line);
  /// Returns when all lines are on the disk.
  void sync() { file_->sync(); }

 private:
  std::unique_ptr<OutputFile> file_;
};

}  // namespace sherd::tools
