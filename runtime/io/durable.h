// Saves that a crash cannot damage: until the new file or folder is complete on the disk, the old one stays.
//
// The new content is written beside the old under another name, synced, and renamed into place. A crash can
// leave names that end in `.sherd-partial` (incomplete) or `.sherd-replaced` (a complete folder that was
// about to be replaced); `recover_directory` removes or renames these.
#pragma once

#include <functional>

#include "runtime/io/file_system.h"

namespace sherd {

/// Writes the file `path` with what `fill` puts into it. When it throws (FileError, or what `fill` throws)
/// the file is still the old one, or already the complete new one if only the last sync failed. Only a
/// regular file or nothing is replaced: FileError for a device, a FIFO, a link or a folder.
SHERD_API void write_durably(const FileSystem::Path& path, const std::function<void(OutputFile&)>& fill,
                             FileSystem& files = posix_file_system());

/// A folder being written; each file is synced before the folder takes its name.
class SHERD_API DirectoryWriter {
 public:
  /// `directory` must exist.
  DirectoryWriter(FileSystem& files, FileSystem::Path directory);
  /// Writes the file `name` in the folder with what `fill` puts into it. FileError, or what `fill` throws.
  void add(std::string_view name, const std::function<void(OutputFile&)>& fill);

 private:
  FileSystem& files_;
  FileSystem::Path directory_;
};

/// Writes the folder `path`, a checkpoint for example, with the files that `fill` adds. The parent must
/// exist, and no one else may be writing the same folder. A folder of that name is replaced as a whole
/// (FileError for anything else of that name); at every moment `committed_directory(path)` is a complete
/// folder. When it throws, that is the old one, or the new one if only the last sync failed.
SHERD_API void write_directory_durably(const FileSystem::Path& path,
                                       const std::function<void(DirectoryWriter&)>& fill,
                                       FileSystem& files = posix_file_system());

/// The folder `path` while several write it, as threads or processes: one of them has this object, all add
/// files to `partial_of(path)`, and when every file is there it calls `commit`. Until then the old folder
/// stays, and without it the new one goes. Rules and errors are those of `write_directory_durably`.
class SHERD_API PendingDirectory {
 public:
  explicit PendingDirectory(const FileSystem::Path& path, FileSystem& files = posix_file_system());
  ~PendingDirectory();
  PendingDirectory(const PendingDirectory&) = delete;
  PendingDirectory& operator=(const PendingDirectory&) = delete;
  /// Where the folder `path` is written before it takes its name.
  static FileSystem::Path partial_of(const FileSystem::Path& path);
  /// Gives the folder its name. When it throws, the folder is the old one, or the new one if only the last
  /// sync failed.
  void commit();

 private:
  FileSystem& files_;
  FileSystem::Path path_;
  bool replaces_ = false, committed_ = false;
};

/// Where the complete folder `path` lies: `path`, or beside it if a crash came while it was being replaced.
SHERD_API FileSystem::Path committed_directory(const FileSystem::Path& path,
                                               FileSystem& files = posix_file_system());

/// Removes a committed folder; a crash on the way leaves it whole or gone.
SHERD_API void remove_durably(const FileSystem::Path& path, FileSystem& files = posix_file_system());

/// Clears what crashes left in `parent`: incomplete files and folders go, folders that lost their name get it
/// back. No one else may be writing there.
SHERD_API void recover_directory(const FileSystem::Path& parent, FileSystem& files = posix_file_system());

}  // namespace sherd
