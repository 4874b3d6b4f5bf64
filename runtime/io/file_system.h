// The few file operations the library needs, behind an interface so that tests can make each one fail.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/export.h"

namespace sherd {

/// A file open for writing. Its functions throw FileError; the destructor without `close` ignores errors.
class SHERD_API OutputFile {
 public:
  virtual ~OutputFile();
  /// Writes all of `bytes` at the end of what was written before.
  virtual void write(std::span<const std::byte> bytes) = 0;
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  /// Returns when what was written is on the disk.
  virtual void sync() = 0;
  /// Closes the file; the object takes no further calls.
  virtual void close() = 0;
};

/// A regular file open for reading. It is read and not mapped: where another program cuts a mapped file
/// short, touching what is gone ends the process, and here it is an error.
class SHERD_API InputFile {
 public:
  virtual ~InputFile();
  /// Bytes it had when it was opened.
  virtual std::uint64_t size() const = 0;
  /// Fills `into` with the bytes from `offset` on; FileError when the file ends before.
  virtual void read(std::uint64_t offset, std::span<std::byte> into) = 0;
};

/// A lock file that this process holds. The destructor removes it; the lock also ends with the process.
class SHERD_API FileLock {
 public:
  virtual ~FileLock();
};

/// File operations. All throw FileError with the path, the call and the system's reason.
class SHERD_API FileSystem {
 public:
  using Path = std::filesystem::path;

  virtual ~FileSystem();
  /// Opens a file that must not exist yet.
  virtual std::unique_ptr<OutputFile> create(const Path& path) = 0;
  /// Opens a regular file for writing at its end, and creates it where it does not exist.
  virtual std::unique_ptr<OutputFile> append(const Path& path) = 0;
  /// Renames `from` to `to`, which it replaces atomically; a directory replaces only an empty directory, and
  /// nothing replaces a link, a device, a FIFO or a socket.
  virtual void rename(const Path& from, const Path& to) = 0;
  /// Returns when all entries of `directory` (renames, new files) are on the disk.
  virtual void sync_directory(const Path& directory) = 0;
  virtual void create_directory(const Path& path) = 0;
  /// Removes a file or an empty directory.
  virtual void remove(const Path& path) = 0;

  /// Locks the file `path` against all other processes and threads, and writes the process's number into it;
  /// null where another has the lock. Where the file system knows no locks everyone gets it.
  virtual std::unique_ptr<FileLock> try_lock(const Path& path) = 0;

  /// What `path` itself is: links are not followed.
  virtual std::filesystem::file_type type(const Path& path) = 0;
  /// The names in `directory`, sorted.
  virtual std::vector<std::string> list(const Path& directory) = 0;
  /// Opens a regular file; FileError for anything else, without waiting for it.
  virtual std::unique_ptr<InputFile> open(const Path& path) = 0;

  bool exists(const Path& path) { return type(path) != std::filesystem::file_type::not_found; }
  bool is_directory(const Path& path) { return type(path) == std::filesystem::file_type::directory; }
  /// Whether a file is there that is no folder, also by a link.
  bool is_file(const Path& path) {
    const std::filesystem::file_type there = type(path);
    return there == std::filesystem::file_type::regular ||
           (there == std::filesystem::file_type::symlink && !exists(path / "."));
  }
  /// The whole content of a regular file; FileError before anything is read when it has more than `limit`
  /// bytes.
  std::string read(const Path& path, std::uint64_t limit = std::uint64_t{1} << 30);
  /// Removes a file or a directory with all it holds; nothing to do where `path` does not exist.
  void remove_tree(const Path& path);
};

/// "a folder", "a FIFO" and so on, for messages.
SHERD_API std::string_view name_of(std::filesystem::file_type type);

/// The operating system's files.
SHERD_API FileSystem& posix_file_system();

}  // namespace sherd
