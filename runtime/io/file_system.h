// The few file operations the library needs, behind an interface so that tests can make each one fail.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/export.h"

namespace sherd {

/// A file open for writing. Destroying it without `close` drops the handle and hides errors: close what
/// matters.
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

/// A whole file mapped for reading; unmapped with the object. Whoever replaces the file must rename, not
/// rewrite it.
class SHERD_API MappedFile {
 public:
  MappedFile() = default;
  /// Takes over a mapping made by mmap; `data` is null for an empty file.
  MappedFile(const std::byte* data, std::size_t size) : data_(data), size_(size) {}
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// File operations. All throw FileError with the path, the call and the system's reason.
class SHERD_API FileSystem {
 public:
  using Path = std::filesystem::path;

  virtual ~FileSystem();
  /// Opens a file that must not exist yet.
  virtual std::unique_ptr<OutputFile> create(const Path& path) = 0;
  /// Opens a file for writing at its end, and creates it where it does not exist.
  virtual std::unique_ptr<OutputFile> append(const Path& path) = 0;
  /// Puts `from` in the place of `to`, atomically; a directory replaces only an empty directory.
  virtual void rename(const Path& from, const Path& to) = 0;
  /// Returns when the names in `directory` are on the disk.
  virtual void sync_directory(const Path& directory) = 0;
  virtual void create_directory(const Path& path) = 0;
  /// Removes a file or an empty directory.
  virtual void remove(const Path& path) = 0;

  virtual bool exists(const Path& path) = 0;
  virtual bool is_directory(const Path& path) = 0;
  /// The names in `directory`, sorted.
  virtual std::vector<std::string> list(const Path& directory) = 0;
  /// The whole content of a file.
  virtual std::string read(const Path& path) = 0;
  virtual MappedFile map(const Path& path) = 0;

  /// Removes a file or a directory with all it holds; nothing to do where `path` does not exist.
  void remove_tree(const Path& path);
};

/// The operating system's files.
SHERD_API FileSystem& posix_file_system();

}  // namespace sherd
