#include "tools/metrics.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "runtime/io/durable.h"
#include "tools/output.h"

namespace sherd::tools {
namespace {

using nlohmann::json;

/// Bytes; ours have a few hundred, and a longer line is damage that is not worth its parsing.
constexpr std::size_t longest_line = 1 << 16;

/// Whether a line belongs to a step up to `step`. The line that ends a run belongs to none: a longer run goes
/// on past it. Nor does a damaged one.
bool stays(std::string_view line, std::int64_t step, const std::string& must) {
  const json entry = json::parse(line, nullptr, false);
  return entry.is_object() && entry.contains(must) && entry.contains("step") &&
         entry["step"].is_number_integer() && entry["step"] <= step;
}

}  // namespace

void cut_metrics(const FileSystem::Path& path, std::int64_t step, FileSystem& files,
                 const std::string& must) {
  const std::string content = files.exists(path) ? files.read(path) : "";
  std::string kept;
  for (std::size_t begin = 0, end; (end = content.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string_view line(content.data() + begin, end + 1 - begin);
    if (line.size() > 1 && line.size() <= longest_line && stays(line, step, must)) kept += line;
  }
  if (kept != content) write_durably(path, [&](OutputFile& file) { file.write(kept); }, files);
}

void each_line(const FileSystem::Path& path, FileSystem& files,
               const std::function<void(std::string_view)>& on) {
  const std::unique_ptr<InputFile> file = files.open(path);
  std::string part(std::size_t{1} << 20, '\0'), line;
  bool overlong = false;
  for (std::uint64_t at = 0, size = file->size(); at < size; at += part.size()) {
    part.resize(std::min<std::uint64_t>(part.size(), size - at));
    file->read(at, std::as_writable_bytes(std::span(part)));
    for (std::size_t begin = 0, end; begin < part.size(); begin = end + 1) {
      end = std::min(part.find('\n', begin), part.size());
      overlong = overlong || line.size() + (end - begin) > longest_line;
      if (overlong)
        line.clear();
      else
        line.append(part, begin, end - begin);
      if (end == part.size()) break;
      on(line);
      line.clear();
      overlong = false;
    }
  }
}

Metrics::Metrics(const FileSystem::Path& path, FileSystem& files) : file_(go_on_with(path, files)) {}

void Metrics::add(const nlohmann::ordered_json& line) { file_->write(line.dump() + "\n"); }

}  // namespace sherd::tools
