#include "tools/text.h"

#include <algorithm>
#include <cmath>

#include "runtime/error.h"

namespace sherd::tools {
namespace {

namespace fs = std::filesystem;
using Path = FileSystem::Path;

/// FNV-1a.
std::uint64_t digested(std::uint64_t digest, std::span<const std::uint8_t> bytes) {
  for (const std::uint8_t byte : bytes) digest = (digest ^ byte) * 0x100000001b3;
  return digest;
}

void add_file(Text& text, std::span<const std::uint8_t> bytes) {
  const std::size_t cut = bytes.size() / 10 * 9 + bytes.size() % 10 * 9 / 10;
  text.train.insert(text.train.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(cut));
  text.validation.insert(text.validation.end(), bytes.begin() + static_cast<std::ptrdiff_t>(cut),
                         bytes.end());
  text.digest = digested(text.digest, bytes);
  for (int shift = 0; shift < 64; shift += 8) {
    const auto byte = static_cast<std::uint8_t>(bytes.size() >> shift);
    text.digest = digested(text.digest, {&byte, 1});
  }
  ++text.files;
}

std::span<const std::uint8_t> bytes_of(const std::string& content) {
  return {reinterpret_cast<const std::uint8_t*>(content.data()), content.size()};
}

void add_folder(Text& text, const Path& folder, FileSystem& files) {
  for (const std::string& name : files.list(folder)) {
    const Path path = folder / name;
    if (name.starts_with('.') || fs::is_symlink(fs::symlink_status(path))) continue;
    if (files.is_directory(path)) {
      add_folder(text, path, files);
    } else if (fs::is_regular_file(path)) {
      const std::string content = files.read(path);
      if (!content.empty() && content.find('\0') == std::string::npos) add_file(text, bytes_of(content));
    }
  }
}

void add_path(Text& text, const Path& path, FileSystem& files) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  check<FileError>(fs::exists(status), "data: '{}': {}", path.string(),
                   error ? error.message() : "no such file or folder");
  if (fs::is_directory(status)) {
    const std::int64_t before = text.files;
    add_folder(text, path, files);
    check<ValueError>(text.files > before, "data: the folder '{}' holds no text file", path.string());
    return;
  }
  const std::string content = files.read(path);
  check<ValueError>(!content.empty(), "data: the file '{}' is empty", path.string());
  add_file(text, bytes_of(content));
}

}  // namespace

Text read_text(std::span<const std::string> paths, FileSystem& files) {
  Text text;
  text.digest = 0xcbf29ce484222325;
  for (const std::string& path : paths) add_path(text, path, files);
  return text;
}

double bigram_loss(const Text& text) {
  std::vector<std::uint32_t> pairs(256 * 256), firsts(256);
  const auto count = [&](std::size_t i) {
    ++pairs[text.train[i - 1] * 256U + text.train[i]];
    ++firsts[text.train[i - 1]];
  };
  for (std::size_t i = 1; i < text.train.size(); ++i) count(i);
  double loss = 0;
  for (std::size_t i = 1; i < text.validation.size(); ++i) {
    const std::uint8_t a = text.validation[i - 1], b = text.validation[i];
    loss += std::log(firsts[a] + 256.0) - std::log(pairs[a * 256U + b] + 1.0);
  }
  return loss / static_cast<double>(std::max<std::size_t>(text.validation.size(), 2) - 1);
}

}  // namespace sherd::tools
