#include "tools/output.h"

#include <algorithm>
#include <iterator>

#include "runtime/error.h"
#include "runtime/io/durable.h"
#include "runtime/shown.h"
#include "tools/metrics.h"

namespace sherd::tools {
namespace {

namespace fs = std::filesystem;
using Path = FileSystem::Path;

/// Absolute and without links, as far as it is there.
Path resolved(const Path& path) {
  std::error_code error;
  const Path absolute = fs::absolute(path, error);
  Path found = fs::weakly_canonical(absolute, error);
  if (error) found = absolute.lexically_normal();
  return found.has_filename() ? found : found.parent_path();
}

bool is_same(const Path& a, const Path& b) {
  std::error_code none;
  return fs::equivalent(a, b, none) || resolved(a) == resolved(b);
}

/// What begins with a dot is not read with its folder.
bool is_read_with(const Path& folder, const Path& path) {
  std::error_code none;
  if (!fs::is_directory(folder, none)) return false;
  const Path inner = resolved(path), outer = resolved(folder);
  const auto [end, rest] = std::ranges::mismatch(outer, inner);
  return end == outer.end() &&
         std::none_of(rest, inner.end(), [](const Path& part) { return part.string().starts_with('.'); });
}

bool is_in_checkpoint(const Path& path, FileSystem& files) {
  const Path folder = resolved(path).parent_path();
  return files.exists(folder / "config.json") &&
         std::ranges::any_of(files.list(folder),
                             [](const std::string& name) { return name.ends_with(".safetensors"); });
}

/// Runs write these; one that is about to begin has none yet.
bool is_of_a_run(const Path& path) {
  const Path name = path.filename();
  return name == metrics_name || name == speed_name || name == ".lock" || name.extension() == ".safetensors";
}

}  // namespace

void check_output(const Output& output, FileSystem& files) {
  const Path& path = output.path;
  const auto refuse_if = [&](bool wrong, std::string_view why) {
    check<FileError>(!wrong, "{}: '{}' {}; name another", output.flag, shown(path.string(), 300), why);
  };
  refuse_if(!path.has_filename(), "names no file");
  const fs::file_type there = files.type(path);
  refuse_if(there != fs::file_type::regular && there != fs::file_type::not_found,
            fmt::format("is {}, only a regular file is replaced", sherd::name_of(there)));
  const bool replaces = there == fs::file_type::regular;
  for (const std::string& taken : output.taken) {
    if (taken.empty()) continue;
    refuse_if(is_same(path, taken), "is a file that this command reads or writes itself");
    refuse_if(replaces && is_read_with(taken, path),
              fmt::format("is read with the folder '{}'", shown(taken, 300)));
  }
  refuse_if(is_of_a_run(path) || (replaces && is_in_checkpoint(path, files)),
            "is a file of a run or checkpoint, which only training replaces");
}

void write_output(const Output& output, std::string_view content, FileSystem& files) {
  check_output(output, files);
  write_durably(output.path, [&](OutputFile& file) { file.write(content); }, files);
}

std::unique_ptr<OutputFile> begin_output(const Output& output, FileSystem& files) {
  write_output(output, {}, files);
  return files.append(output.path);
}

std::unique_ptr<OutputFile> go_on_with(const Path& path, FileSystem& files) {
  const fs::file_type there = files.type(path);
  check<FileError>(there == fs::file_type::regular || there == fs::file_type::not_found,
                   "write: '{}' is {}, only a regular file is written on; move it elsewhere",
                   shown(path.string(), 300), sherd::name_of(there));
  return files.append(path);
}

}  // namespace sherd::tools
