#include "tools/output.h"

#include <algorithm>
#include <iterator>
#include <optional>

#include "runtime/error.h"
#include "runtime/io/durable.h"
#include "runtime/shown.h"
#include "tools/checkpoint.h"
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

/// The names that lead from `folder` to `path`; none where it leads elsewhere.
std::optional<std::vector<std::string>> way_to(const Path& folder, const Path& path) {
  const Path inner = resolved(path), outer = resolved(folder);
  const auto [end, rest] = std::ranges::mismatch(outer, inner);
  if (end != outer.end()) return {};
  return std::vector<std::string>(rest, inner.end());
}

bool is_a_folder(const Path& path) {
  std::error_code none;
  return fs::is_directory(path.empty() ? "." : path, none);
}

bool is_in_checkpoint(const Path& path, FileSystem& files) {
  const Path folder = resolved(path).parent_path();
  return files.exists(folder / "config.json") &&
         std::ranges::any_of(files.list(folder),
                             [](const std::string& name) { return name.ends_with(".safetensors"); });
}

/// Runs write these; one that is about to begin has none yet.
bool is_of_a_run(const Path& path, Holds holds) {
  const Path name = path.filename();
  return name == metrics_name || name == speed_name || name == ".lock" ||
         (name.extension() == ".safetensors" && holds != Holds::tensors);
}

}  // namespace

bool is_read_with(const Path& folder, const Path& path) {
  const auto way = way_to(folder, path);
  return is_a_folder(folder) && way &&
         std::ranges::none_of(*way, [](const std::string& name) { return name.starts_with('.'); });
}

void check_output(const Output& output, FileSystem& files) {
  const Path& path = output.path;
  const auto refuse_if = [&](bool wrong, std::string_view why) {
    check<FileError>(!wrong, "{}: '{}' {}; name another", output.flag, shown(path.string(), 300), why);
  };
  refuse_if(!path.has_filename(), "names no file");
  const fs::file_type there = files.type(path);
  refuse_if(there != fs::file_type::regular && there != fs::file_type::not_found,
            fmt::format("is {}, only a regular file is replaced", sherd::name_of(there)));
  bool has_folder = is_a_folder(path.parent_path());
  for (const std::string& made : output.made) {
    refuse_if(way_to(path, made).has_value(),
              fmt::format("is where the folder '{}' is made", shown(made, 300)));
    const auto way = way_to(made, path);
    refuse_if(way && has_checkpoint_name(way->front()), "is where a checkpoint is made");
    has_folder = has_folder || (way && way->size() == 1);
  }
  refuse_if(!has_folder, "lies in no folder that is there");
  const bool replaces = there == fs::file_type::regular;
  for (const std::string& taken : output.taken) {
    if (taken.empty()) continue;
    refuse_if(is_same(path, taken), "is a file that this command reads or writes itself");
    refuse_if(replaces && is_read_with(taken, path),
              fmt::format("is read with the folder '{}'", shown(taken, 300)));
  }
  const bool goes_among = replaces || output.holds == Holds::tensors;
  refuse_if(is_of_a_run(path, output.holds) || (goes_among && is_in_checkpoint(path, files)),
            "is a file of a run or checkpoint, which only training replaces");
}

void check_new_folder(std::string_view flag, const Path& path, const std::vector<std::string>& taken,
                      FileSystem& files) {
  const auto refuse_if = [&](bool wrong, std::string_view why) {
    check<FileError>(!wrong, "{}: '{}' {}; name another folder", flag, shown(path.string(), 300), why);
  };
  refuse_if(path.empty() || files.exists(path), path.empty() ? "names none" : "is there already");
  refuse_if(!is_a_folder(resolved(path).parent_path()), "lies in no folder that is there");
  for (const std::string& folder : taken)
    refuse_if(!folder.empty() && way_to(folder, path).has_value(),
              fmt::format("lies in '{}', which this command reads", shown(folder, 300)));
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
