#include "runtime/io/file_system.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include "runtime/error.h"

namespace sherd {
namespace {

using Path = FileSystem::Path;

[[noreturn]] void fail_file(std::string_view call, const Path& path, int error) {
  fail<FileError>("{}: '{}': {}", call, path.string(), std::generic_category().message(error));
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

/// Owns a file descriptor.
class Descriptor {
 public:
  Descriptor(const Path& path, int flags)
      : fd_(retry([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); })) {
    check_file(fd_ != -1, "open", path);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
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
  PosixOutputFile(const Path& path, int flags) : path_(path), fd_(path, flags) {}

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

class PosixFileSystem final : public FileSystem {
 public:
  std::unique_ptr<OutputFile> create(const Path& path) override {
    return std::make_unique<PosixOutputFile>(path, O_WRONLY | O_CREAT | O_EXCL);
  }
  std::unique_ptr<OutputFile> append(const Path& path) override {
    return std::make_unique<PosixOutputFile>(path, O_WRONLY | O_CREAT | O_APPEND);
  }
  void rename(const Path& from, const Path& to) override {
    if (::rename(from.c_str(), to.c_str()) == 0) return;
    const std::string reason = std::generic_category().message(errno);
    fail<FileError>("rename: '{}' to '{}': {}", from.string(), to.string(), reason);
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

  bool exists(const Path& path) override { return type_of(path) != std::filesystem::file_type::not_found; }
  bool is_directory(const Path& path) override {
    return type_of(path) == std::filesystem::file_type::directory;
  }
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
  std::string read(const Path& path) override {
    const Descriptor fd(path, O_RDONLY);
    std::string content;
    for (std::size_t size = 0;;) {
      content.resize(std::max<std::size_t>(std::size_t{1} << 16, 2 * size));
      const ssize_t got =
          retry([&] { return ::read(fd.get(), content.data() + size, content.size() - size); });
      check_file(got != -1, "read", path);
      size += static_cast<std::size_t>(got);
      if (got == 0) {
        content.resize(size);
        return content;
      }
    }
  }
  MappedFile map(const Path& path) override {
    const Descriptor fd(path, O_RDONLY);
    struct stat status{};
    check_file(::fstat(fd.get(), &status) == 0, "stat", path);
    if (S_ISDIR(status.st_mode)) fail_file("map", path, EISDIR);
    if (status.st_size == 0) return {};
    const auto size = static_cast<std::size_t>(status.st_size);
    void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd.get(), 0);
    check_file(data != MAP_FAILED, "map", path);
    return {static_cast<const std::byte*>(data), size};
  }

 private:
  static std::filesystem::file_type type_of(const Path& path) {
    std::error_code error;
    const auto status = std::filesystem::symlink_status(path, error);
    if (status.type() == std::filesystem::file_type::none) fail_file("stat", path, error.value());
    return status.type();
  }
};

}  // namespace

OutputFile::~OutputFile() = default;
FileSystem::~FileSystem() = default;

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
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
