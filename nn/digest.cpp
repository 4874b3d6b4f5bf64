#include "nn/digest.h"

#include <algorithm>

#include "runtime/io/checksum.h"

namespace sherd::nn {
namespace {

std::string checksum(std::string_view text) { return checksum_of(std::as_bytes(std::span(text))); }

}  // namespace

void Digest::add(std::string_view text) { value_ = checksum(value_ + checksum(text)); }

void Digest::add(InputFile& file) {
  constexpr std::uint64_t chunk_bytes = std::uint64_t{1} << 20;
  add(std::to_string(file.size()));
  for (std::uint64_t at = 0; at < file.size(); at += chunk_bytes)
    add(read_part(file, at, std::min(at + chunk_bytes, file.size())));
}

std::string read_part(InputFile& file, std::uint64_t begin, std::uint64_t end) {
  std::string text(end - begin, '\0');
  file.read(begin, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace sherd::nn
