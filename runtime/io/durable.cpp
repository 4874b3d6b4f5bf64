#include "runtime/io/durable.h"

#include <fmt/format.h>

#include <exception>
#include <random>
#include <utility>

#include "runtime/error.h"
#include "runtime/shown.h"

namespace sherd {
namespace {

using Path = FileSystem::Path;
using std::filesystem::file_type;

constexpr std::string_view partial_suffix = ".sherd-partial", replaced_suffix = ".sherd-replaced";

Path without_trailing_slash(const Path& path) { return path.has_filename() ? path : path.parent_path(); }

Path parent_of(const Path& path) { return path.has_parent_path() ? path.parent_path() : Path("."); }

Path with_suffix(Path path, std::string_view suffix) { return path += suffix; }

/// A name of its own for each writer: two that write one file by mistake end with one of the two contents,
/// not a mixture.
Path unique_partial(const Path& path) {
  std::random_device random;
  return with_suffix(path, fmt::format(".{:08x}{:08x}{}", random(), random(), partial_suffix));
}

/// FileError unless `path` is free or of the kind that is written: a device, a FIFO, a link, or a file in a
/// folder's place is no older version of it.
void require_replaceable(FileSystem& files, const Path& path, file_type by) {
  const file_type there = files.type(path);
  check<FileError>(there == by || there == file_type::not_found,
                   "write: '{}': is {}, which {} does not replace; name another", shown(path.string(), 300),
                   name_of(there), name_of(by));
}

void fill_file(FileSystem& files, const Path& path, const std::function<void(OutputFile&)>& fill) {
  const std::unique_ptr<OutputFile> file = files.create(path);
  fill(*file);
  file->sync();
  file->close();
}

/// For cleaning up where an error must not end the call: what stays behind is removed by the next write or
/// recovery.
void try_remove_tree(FileSystem& files, const Path& path) noexcept {
  try {
    files.remove_tree(path);
  } catch (const std::exception&) {
  }
}

/// Renames a folder that was about to be replaced back to its name, or removes it if its successor has the
/// name.
void settle_replaced(FileSystem& files, const Path& path) {
  const Path replaced = with_suffix(path, replaced_suffix);
  if (!files.exists(replaced)) return;
  const bool has_successor = files.exists(path);
  if (!has_successor) files.rename(replaced, path);
  // The successor's name may not be on the disk yet; until it is, the old folder is needed.
  files.sync_directory(parent_of(path));
  if (has_successor) files.remove_tree(replaced);
}

}  // namespace

DirectoryWriter::DirectoryWriter(FileSystem& files, Path directory)
    : files_(files), directory_(std::move(directory)) {}

void DirectoryWriter::add(std::string_view name, const std::function<void(OutputFile&)>& fill) {
  fill_file(files_, directory_ / name, fill);
}

void write_durably(const Path& path, const std::function<void(OutputFile&)>& fill, FileSystem& files) {
  check<FileError>(path.has_filename(), "write: '{}' names no file", shown(path.string(), 300));
  require_replaceable(files, path, file_type::regular);
  check<FileError>(files.type(parent_of(path)) != file_type::not_found,
                   "write: '{}': its folder is not there; make it first", shown(path.string(), 300));
  const Path partial = unique_partial(path);
  try {
    fill_file(files, partial, fill);
    files.rename(partial, path);
  } catch (...) {
    try_remove_tree(files, partial);
    throw;
  }
  files.sync_directory(parent_of(path));
}

PendingDirectory::PendingDirectory(const Path& path, FileSystem& files)
    : files_(files), path_(without_trailing_slash(path)) {
  require_replaceable(files_, path_, file_type::directory);
  check<FileError>(files_.type(parent_of(path_)) != file_type::not_found,
                   "write: '{}': '{}', in which it is to lie, is not there; make it first",
                   shown(path_.string(), 300), shown(parent_of(path_).string(), 300));
  files_.remove_tree(partial_of(path_));
  settle_replaced(files_, path_);
  replaces_ = files_.exists(path_);
  files_.create_directory(partial_of(path_));
}

PendingDirectory::~PendingDirectory() {
  if (committed_) return;
  try_remove_tree(files_, partial_of(path_));
  if (!replaces_) return;
  try {
    settle_replaced(files_, path_);
  } catch (const std::exception&) {
    // committed_directory still finds it
  }
}

Path PendingDirectory::partial_of(const Path& path) {
  return with_suffix(without_trailing_slash(path), partial_suffix);
}

void PendingDirectory::commit() {
  const Path partial = partial_of(path_), replaced = with_suffix(path_, replaced_suffix);
  files_.sync_directory(partial);
  if (replaces_) files_.rename(path_, replaced);
  files_.rename(partial, path_);
  committed_ = true;
  files_.sync_directory(parent_of(path_));
  if (replaces_) try_remove_tree(files_, replaced);
}

void write_directory_durably(const Path& path, const std::function<void(DirectoryWriter&)>& fill,
                             FileSystem& files) {
  PendingDirectory pending(path, files);
  DirectoryWriter writer(files, PendingDirectory::partial_of(path));
  fill(writer);
  pending.commit();
}

Path committed_directory(const Path& given, FileSystem& files) {
  const Path path = without_trailing_slash(given);
  const Path replaced = with_suffix(path, replaced_suffix);
  return !files.exists(path) && files.exists(replaced) ? replaced : path;
}

void remove_durably(const Path& given, FileSystem& files) {
  const Path path = without_trailing_slash(given);
  const Path partial = with_suffix(path, partial_suffix);
  require_replaceable(files, path, file_type::directory);
  files.remove_tree(partial);
  settle_replaced(files, path);
  if (!files.exists(path)) return;
  files.rename(path, partial);
  files.sync_directory(parent_of(path));
  files.remove_tree(partial);
}

void recover_directory(const Path& parent, FileSystem& files) {
  for (const std::string& name : files.list(parent)) {
    if (name.ends_with(partial_suffix)) {
      files.remove_tree(parent / name);
    } else if (name.ends_with(replaced_suffix)) {
      settle_replaced(files, parent / name.substr(0, name.size() - replaced_suffix.size()));
    }
  }
}

}  // namespace sherd
