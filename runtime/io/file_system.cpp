#include "runtime/io/file_system.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <tuple>
#include <utility>

#include "runtime/error.h"
#include "runtime/shown.h"

namespace sherd {
namespace {

using Path = FileSystem::Path;
using std::filesystem::file_type;

/// A path in a message; longer ones than the system takes are cut.
std::string shown_path(const Path& path) { return shown(path.string(), 300); }

[[noreturn]] void fail_file(std::string_view call, const Path& path, int error) {
  fail<FileError>("{}: '{}': {}", call, shown_path(path), std::generic_category().message(error));
}

void check_file(bool ok, std::string_view call, const Path& path) {
  if (!ok) [[unlikely]]
    fail_file(call, path, errno);
}

template <class Call>
auto retry(Call call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

file_type type_of(const Path& path) {
  std::error_code error;
  const auto status = std::filesystem::symlink_status(path, error);
  if (status.type() == file_type::none) fail_file("stat", path, error.value());
  return status.type();
}

/// Owns a file descriptor.
class Descriptor {
 public:
  Descriptor(const Path& path, int flags)
      : fd_(retry([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); })) {
    check_file(fd_ != -1, "open", path);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (fd_ != -1) ::close(fd_);
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

class PosixOutputFile final : public OutputFile {
 public:
  PosixOutputFile(const Path& path, Descriptor fd) : path_(path), fd_(std::move(fd)) {}

  void write(std::span<const std::byte> bytes) override {
    while (!bytes.empty()) {
      const ssize_t written = retry([&] { return ::write(fd_.get(), bytes.data(), bytes.size()); });
      check_file(written != -1, "write", path_);
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
  }
  void sync() override {
    check_file(retry([&] { return ::fsync(fd_.get()); }) == 0, "fsync", path_);
  }
  void close() override {
    // On Linux the descriptor is gone even when close is interrupted; a second close could hit another file.
    check_file(::close(fd_.release()) == 0 || errno == EINTR, "close", path_);
  }

 private:
  Path path_;
  Descriptor fd_;
};

struct stat status_of(const Descriptor& fd, const Path& path) {
  struct stat status{};
  check_file(::fstat(fd.get(), &status) == 0, "stat", path);
  return status;
}

/// FileError unless what is open is a regular file.
void require_regular(const Descriptor& fd, const Path& path) {
  const mode_t mode = status_of(fd, path).st_mode;
  if (S_ISDIR(mode)) fail_file("open", path, EISDIR);
  check<FileError>(S_ISREG(mode), "open: '{}': is no regular file", shown_path(path));
}

/// FileError where `path` is a device, a FIFO or a socket. Checked before opening, because opening one may
/// already do something.
void require_regular(const Path& path) {
  std::error_code error;
  const file_type type = std::filesystem::status(path, error).type();
  if (type == file_type::none) fail_file("open", path, error.value());
  check<FileError>(type == file_type::regular || type == file_type::directory || type == file_type::not_found,
                   "open: '{}': is {}, only a regular file will do", shown_path(path), name_of(type));
}

/// Opens a regular file, or creates one where `flags` say so.
Descriptor open_regular(const Path& path, int flags) {
  require_regular(path);
  Descriptor fd(path, flags | O_NONBLOCK | O_NOCTTY);
  require_regular(fd, path);
  return fd;
}

class PosixInputFile final : public InputFile {
 public:
  explicit PosixInputFile(const Path& path)
      : path_(path),
        fd_(open_regular(path, O_RDONLY)),
        size_(static_cast<std::uint64_t>(status_of(fd_, path).st_size)) {}

  std::uint64_t size() const override { return size_; }
  void read(std::uint64_t offset, std::span<std::byte> into) override {
    while (!into.empty()) {
      const ssize_t got =
          retry([&] { return ::pread(fd_.get(), into.data(), into.size(), static_cast<off_t>(offset)); });
      check_file(got != -1, "read", path_);
      check<FileError>(got > 0, "read: '{}': the file ends at byte {}, {} more are needed", shown_path(path_),
                       offset, into.size());
      offset += static_cast<std::uint64_t>(got);
      into = into.subspan(static_cast<std::size_t>(got));
    }
  }

 private:
  Path path_;
  Descriptor fd_;
  std::uint64_t size_;
};

class PosixLock final : public FileLock {
 public:
  PosixLock(Path path, Descriptor fd) : path_(std::move(path)), fd_(std::move(fd)) {
    // For people to read, so an error (a full disk) is ignored.
    const std::string process = std::to_string(::getpid());
    if (::ftruncate(fd_.get(), 0) == 0) std::ignore = ::pwrite(fd_.get(), process.data(), process.size(), 0);
  }
  // Removed while the lock is held, so that no one can get the lock of a file that then loses its name.
  ~PosixLock() override { ::unlink(path_.c_str()); }

 private:
  Path path_;
  Descriptor fd_;
};

/// Whether `path` still names the file that is open.
bool is_named(const Descriptor& fd, const Path& path) {
  struct stat named{};
  if (::lstat(path.c_str(), &named) != 0) return false;
  const struct stat open = status_of(fd, path);
  return named.st_dev == open.st_dev && named.st_ino == open.st_ino;
}

class PosixFileSystem final : public FileSystem {
 public:
  std::unique_ptr<OutputFile> create(const Path& path) override {
    return std::make_unique<PosixOutputFile>(path, Descriptor(path, O_WRONLY | O_CREAT | O_EXCL));
  }
  std::unique_ptr<OutputFile> append(const Path& path) override {
    return std::make_unique<PosixOutputFile>(path, open_regular(path, O_WRONLY | O_CREAT | O_APPEND));
  }
  void rename(const Path& from, const Path& to) override {
    const file_type type = type_of(to);
    check<FileError>(
        type == file_type::not_found || type == file_type::regular || type == file_type::directory,
        "rename: '{}' to '{}': that is {}, which is never replaced", shown_path(from), shown_path(to),
        name_of(type));
    if (::rename(from.c_str(), to.c_str()) == 0) return;
    const std::string reason = std::generic_category().message(errno);
    fail<FileError>("rename: '{}' to '{}': {}", shown_path(from), shown_path(to), reason);
  }
  void sync_directory(const Path& directory) override {
    const Descriptor fd(directory, O_RDONLY | O_DIRECTORY);
    const bool synced = retry([&] { return ::fsync(fd.get()); }) == 0;
    // Some network file systems have no fsync for directories; their renames are ordered by the server.
    check_file(synced || errno == EINVAL || errno == ENOTSUP, "fsync", directory);
  }
  void create_directory(const Path& path) override {
    check_file(::mkdir(path.c_str(), 0777) == 0, "mkdir", path);
  }
  void remove(const Path& path) override { check_file(::remove(path.c_str()) == 0, "remove", path); }

  std::unique_ptr<FileLock> try_lock(const Path& path) override {
    for (;;) {
      Descriptor fd = open_regular(path, O_RDWR | O_CREAT | O_NOFOLLOW);
      if (retry([&] { return ::flock(fd.get(), LOCK_EX | LOCK_NB); }) != 0) {
        if (errno == EWOULDBLOCK) return nullptr;
        check_file(errno == ENOLCK || errno == ENOSYS || errno == ENOTSUP, "flock", path);
      }
      // The lock's last holder may have removed the file after this call opened it: then open anew.
      if (is_named(fd, path)) return std::make_unique<PosixLock>(path, std::move(fd));
    }
  }

  file_type type(const Path& path) override { return type_of(path); }
  std::vector<std::string> list(const Path& directory) override {
    std::error_code error;
    std::vector<std::string> names;
    std::filesystem::directory_iterator entry(directory, error);
    for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
      names.push_back(entry->path().filename().string());
    }
    if (error) fail_file("list", directory, error.value());
    std::ranges::sort(names);
    return names;
  }
  std::unique_ptr<InputFile> open(const Path& path) override {
    return std::make_unique<PosixInputFile>(path);
  }
};

}  // namespace

OutputFile::~OutputFile() = default;
FileSystem::~FileSystem() = default;
InputFile::~InputFile() = default;
FileLock::~FileLock() = default;

std::string_view name_of(file_type type) {
  switch (type) {
    case file_type::regular:
      return "a regular file";
    case file_type::directory:
      return "a folder";
    case file_type::symlink:
      return "a symbolic link";
    case file_type::block:
    case file_type::character:
      return "a device";
    case file_type::fifo:
      return "a FIFO";
    case file_type::socket:
      return "a socket";
    case file_type::not_found:
      return "nothing";
    default:
      return "of an unknown kind";
  }
}

std::string FileSystem::read(const Path& path, std::uint64_t limit) {
  const std::unique_ptr<InputFile> file = open(path);
  check<FileError>(file->size() <= limit, "read: '{}': has {} bytes, the limit is {}", shown_path(path),
                   file->size(), limit);
  std::string content(file->size(), '\0');
  file->read(0, std::as_writable_bytes(std::span(content)));
  return content;
}

void FileSystem::remove_tree(const Path& path) {
  if (!exists(path)) return;
  if (is_directory(path)) {
    for (const std::string& name : list(path)) remove_tree(path / name);
  }
  remove(path);
}

FileSystem& posix_file_system() {
  static PosixFileSystem files;  // holds no state
  return files;
}

}  // namespace sherd
