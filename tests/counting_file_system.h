// A file system that numbers every change it is asked for and can break at any one of them.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "runtime/io/file_system.h"

namespace sherd::test {

/// How the chosen change goes wrong.
enum class Fault {
  no_space,     ///< it alone fails, a write after half its bytes; what follows works
  io_error,     ///< the same with another reason
  killed,       ///< the process ends: a write stays half done, everything after is refused
  loses_data,   ///< the machine ends: as killed, and bytes that were not synced are gone
  loses_names,  ///< the machine ends: as killed, and new names whose directory was not synced are undone
};
inline constexpr Fault all_faults[] = {Fault::no_space, Fault::io_error, Fault::killed, Fault::loses_data,
                                       Fault::loses_names};
std::string_view name_of(Fault fault);

/// Forwards to the operating system, but only notes a sync: what it protects is lost by the faults above
/// instead. Threads may share one; which of their changes comes first is not fixed then.
class CountingFileSystem : public FileSystem {
 public:
  CountingFileSystem() = default;
  /// Breaks at change number `n`, from 0.
  CountingFileSystem(int n, Fault fault) : break_at_(n), fault_(fault) {}

  bool broke() const { return log_.size() > static_cast<std::size_t>(break_at_); }
  /// The changes so far, as "write NAME" and the like; its size is their number.
  const std::vector<std::string>& log() const { return log_; }

  /// Ends the process or the machine now, by the fault given, if it did not end before.
  void crash();

  std::unique_ptr<OutputFile> create(const Path& path) override;
  std::unique_ptr<OutputFile> append(const Path& path) override;
  void rename(const Path& from, const Path& to) override;
  void sync_directory(const Path& directory) override;
  void create_directory(const Path& path) override;
  void remove(const Path& path) override;
  std::unique_ptr<FileLock> try_lock(const Path& path) override;
  std::filesystem::file_type type(const Path& path) override;
  std::vector<std::string> list(const Path& directory) override;
  std::unique_ptr<InputFile> open(const Path& path) override;

 private:
  class File;
  struct Rename {
    Path from, to;
    std::optional<std::string> replaced;  // the content of the file that `to` was
  };

  /// Numbers a change; true when it is the one to break. Refuses after a crash.
  bool breaks(std::string_view call, const Path& path);
  [[noreturn]] void break_now(std::string_view call, const Path& path);
  void change(std::string_view call, const Path& path) {
    if (breaks(call, path)) break_now(call, path);
  }
  void refuse_if_dead(std::string_view call, const Path& path) const;
  void note_rename(const Path& from, const Path& to);
  void lose_data();
  void lose_names();

  FileSystem& files_ = posix_file_system();
  mutable std::recursive_mutex mutex_;  // of all that follows
  int break_at_ = 1 << 30;
  Fault fault_ = Fault::io_error;
  bool dead_ = false;
  std::vector<std::string> log_;
  std::map<Path, std::uintmax_t> unsynced_;  // file and its bytes that are on the disk
  std::set<Path> created_;                   // whose directory was not synced
  std::vector<Rename> renames_;              // the same
};

}  // namespace sherd::test
