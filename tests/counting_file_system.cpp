#include "tests/counting_file_system.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "runtime/error.h"

namespace sherd::test {

namespace fs = std::filesystem;

std::string_view name_of(Fault fault) {
  constexpr std::string_view names[] = {"no space", "input/output error", "killed", "loses data",
                                        "loses names"};
  return names[static_cast<int>(fault)];
}

class CountingFileSystem::File final : public OutputFile {
 public:
  File(CountingFileSystem& owner, const Path& path, std::unique_ptr<OutputFile> file)
      : owner_(owner), path_(path), file_(std::move(file)) {}

  void write(std::span<const std::byte> bytes) override {
    const std::scoped_lock lock(owner_.mutex_);
    const bool breaks = owner_.breaks("write", path_);
    owner_.unsynced_.try_emplace(path_, fs::file_size(path_));
    file_->write(breaks ? bytes.first(bytes.size() / 2) : bytes);
    if (breaks) owner_.break_now("write", path_);
  }
  void sync() override {
    const std::scoped_lock lock(owner_.mutex_);
    owner_.change("sync", path_);
    owner_.unsynced_.erase(path_);
  }
  void close() override {
    const std::scoped_lock lock(owner_.mutex_);
    owner_.change("close", path_);
    file_->close();
  }

 private:
  CountingFileSystem& owner_;
  Path path_;
  std::unique_ptr<OutputFile> file_;
};

bool CountingFileSystem::breaks(std::string_view call, const Path& path) {
  refuse_if_dead(call, path);
  log_.push_back(std::string(call) + " " + path.filename().string());
  return log_.size() == static_cast<std::size_t>(break_at_) + 1;
}

void CountingFileSystem::break_now(std::string_view call, const Path& path) {
  if (fault_ >= Fault::killed) crash();
  const int error = fault_ == Fault::no_space ? ENOSPC : EIO;
  fail<FileError>("{}: '{}': {} (on purpose)", call, path.string(), std::generic_category().message(error));
}

void CountingFileSystem::crash() {
  const std::scoped_lock lock(mutex_);
  if (std::exchange(dead_, true)) return;
  if (fault_ == Fault::loses_data) lose_data();
  if (fault_ == Fault::loses_names) lose_names();
}

void CountingFileSystem::refuse_if_dead(std::string_view call, const Path& path) const {
  const std::scoped_lock lock(mutex_);
  check<FileError>(!dead_, "{}: '{}': the process has ended (on purpose)", call, path.string());
}

void CountingFileSystem::lose_data() {
  for (const auto& [path, bytes] : unsynced_) fs::resize_file(path, bytes);
}

void CountingFileSystem::lose_names() {
  for (const Path& path : created_) fs::remove_all(path);
  for (auto it = renames_.rbegin(); it != renames_.rend(); ++it) {
    // What was removed since stays away: a removal is never undone, which is the worse case.
    if (fs::exists(it->to)) fs::rename(it->to, it->from);
    if (it->replaced) files_.create(it->to)->write(*it->replaced);
  }
}

std::unique_ptr<OutputFile> CountingFileSystem::create(const Path& path) {
  const std::scoped_lock lock(mutex_);
  change("create", path);
  auto file = files_.create(path);
  created_.insert(path);
  return std::make_unique<File>(*this, path, std::move(file));
}

std::unique_ptr<OutputFile> CountingFileSystem::append(const Path& path) {
  const std::scoped_lock lock(mutex_);
  change("append", path);
  const bool is_new = !files_.exists(path);
  auto file = files_.append(path);
  if (is_new) created_.insert(path);
  return std::make_unique<File>(*this, path, std::move(file));
}

void CountingFileSystem::rename(const Path& from, const Path& to) {
  const std::scoped_lock lock(mutex_);
  change("rename", from);
  std::optional<std::string> replaced;
  if (files_.exists(to) && !files_.is_directory(to)) replaced = files_.read(to);
  files_.rename(from, to);
  renames_.push_back({from, to, std::move(replaced)});
  note_rename(from, to);
}

void CountingFileSystem::note_rename(const Path& from, const Path& to) {
  const auto moved = [&](const Path& path) {
    const Path inside = path.lexically_relative(from);
    return path == from ? to : *inside.begin() == ".." ? path : to / inside;
  };
  unsynced_.erase(to);
  std::map<Path, std::uintmax_t> unsynced;
  for (const auto& [path, bytes] : unsynced_) unsynced[moved(path)] = bytes;
  unsynced_ = std::move(unsynced);
  std::set<Path> created;
  for (const Path& path : created_) created.insert(moved(path));
  created_ = std::move(created);
}

void CountingFileSystem::sync_directory(const Path& directory) {
  const std::scoped_lock lock(mutex_);
  change("sync_directory", directory);
  std::erase_if(renames_, [&](const Rename& r) { return r.to.parent_path() == directory; });
  std::erase_if(created_, [&](const Path& path) { return path.parent_path() == directory; });
}

void CountingFileSystem::create_directory(const Path& path) {
  const std::scoped_lock lock(mutex_);
  change("create_directory", path);
  files_.create_directory(path);
  created_.insert(path);
}

void CountingFileSystem::remove(const Path& path) {
  const std::scoped_lock lock(mutex_);
  change("remove", path);
  files_.remove(path);
  unsynced_.erase(path);
  created_.erase(path);
}

std::unique_ptr<FileLock> CountingFileSystem::try_lock(const Path& path) {
  const std::scoped_lock lock(mutex_);
  change("lock", path);
  return files_.try_lock(path);
}

fs::file_type CountingFileSystem::type(const Path& path) {
  refuse_if_dead("type", path);
  return files_.type(path);
}

std::vector<std::string> CountingFileSystem::list(const Path& directory) {
  refuse_if_dead("list", directory);
  return files_.list(directory);
}

std::unique_ptr<InputFile> CountingFileSystem::open(const Path& path) {
  refuse_if_dead("open", path);
  return files_.open(path);
}

}  // namespace sherd::test
