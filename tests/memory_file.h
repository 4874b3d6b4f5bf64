// Files that lie in memory.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "runtime/error.h"
#include "runtime/io/file_system.h"

namespace sherd::test {

using Bytes = std::vector<std::byte>;

/// Keeps what was written.
class MemoryOutput final : public OutputFile {
 public:
  void write(std::span<const std::byte> more) override {
    bytes.insert(bytes.end(), more.begin(), more.end());
  }
  void sync() override {}
  void close() override {}

  Bytes bytes;
};

/// Reads bytes that live longer than it does.
class MemoryInput final : public InputFile {
 public:
  explicit MemoryInput(std::span<const std::byte> bytes) : bytes_(bytes) {}
  std::uint64_t size() const override { return bytes_.size(); }
  void read(std::uint64_t offset, std::span<std::byte> into) override {
    check<FileError>(offset <= bytes_.size() && into.size() <= bytes_.size() - offset,
                     "read: {} bytes from {} of {}", into.size(), offset, bytes_.size());
    std::ranges::copy(bytes_.subspan(offset, into.size()), into.begin());
  }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace sherd::test
