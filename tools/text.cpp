#include "tools/text.h"

#include <algorithm>
#include <cmath>

#include "runtime/error.h"

namespace sherd::tools {
namespace {

namespace fs = std::filesystem;
using Path = FileSystem::Path;

constexpr std::uint64_t most_text_bytes = std::uint64_t{1} << 30;

/// FNV-1a.
std::uint64_t digested(std::uint64_t digest, std::span<const std::uint8_t> bytes) {
  for (const std::uint8_t byte : bytes) digest = (digest ^ byte) * 0x100000001b3;
  return digest;
}

/// Adds a part of `file` to the end of `to`.
void append(std::vector<std::uint8_t>& to, Text& text, InputFile& file, std::uint64_t begin,
            std::uint64_t end) {
  const std::size_t before = to.size();
  to.resize(before + (end - begin));
  const std::span<std::uint8_t> part = std::span(to).subspan(before);
  file.read(begin, std::as_writable_bytes(part));
  text.digest = digested(text.digest, part);
}

void add_file(Text& text, InputFile& file, const Path& path) {
  const std::uint64_t size = file.size(), all = text.train.size() + text.validation.size() + size;
  check<ValueError>(all <= most_text_bytes,
                    "data: '{}': makes {} bytes of text, which is held in memory; the limit is {}, name less",
                    path.string(), all, most_text_bytes);
  const std::uint64_t cut = size / 10 * 9 + size % 10 * 9 / 10;
  append(text.train, text, file, 0, cut);
  append(text.validation, text, file, cut, size);
  for (int shift = 0; shift < 64; shift += 8) {
    const auto byte = static_cast<std::uint8_t>(size >> shift);
    text.digest = digested(text.digest, {&byte, 1});
  }
  ++text.files;
}

/// Whether it holds something and no zero byte. Of a file that is too large anyway only the beginning is
/// read.
bool is_text(InputFile& file) {
  std::vector<std::byte> part;
  for (std::uint64_t at = 0; at < std::min(file.size(), most_text_bytes); at += part.size()) {
    part.resize(std::min<std::uint64_t>(1 << 16, file.size() - at));
    file.read(at, part);
    if (std::ranges::find(part, std::byte{0}) != part.end()) return false;
    if (file.size() > most_text_bytes) return true;
  }
  return file.size() > 0;
}

void add_folder(Text& text, const Path& folder, FileSystem& files) {
  for (const std::string& name : files.list(folder)) {
    const Path path = folder / name;
    if (name.starts_with('.')) continue;
    const fs::file_type type = files.type(path);
    if (type == fs::file_type::directory) {
      add_folder(text, path, files);
    } else if (type == fs::file_type::regular) {
      const std::unique_ptr<InputFile> file = files.open(path);
      if (is_text(*file)) add_file(text, *file, path);
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
  const std::unique_ptr<InputFile> file = files.open(path);
  check<ValueError>(file->size() > 0, "data: the file '{}' is empty", path.string());
  add_file(text, *file, path);
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
