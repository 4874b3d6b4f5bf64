#include "runtime/io/checksum.h"

#include <fmt/format.h>

#include "runtime/io/xxhash_inline.h"

namespace sherd {
namespace {

/// Where the digits after `marker` begin; npos where there is no room for them.
std::size_t digits_at(std::string_view text, std::string_view marker) {
  const std::size_t found = text.find(marker);
  if (found == std::string_view::npos || text.size() - found - marker.size() < checksum_digits)
    return std::string_view::npos;
  return found + marker.size();
}

std::string checksum_with_zeros(std::string& text, std::size_t at) {
  text.replace(at, checksum_digits, checksum_digits, '0');
  return checksum_of(std::as_bytes(std::span(text)));
}

}  // namespace

std::string checksum_of(std::span<const std::byte> bytes) {
  return fmt::format("{:016x}", XXH3_64bits(bytes.data(), bytes.size()));
}

void seal(std::string& text, std::string_view marker) {
  const std::size_t at = digits_at(text, marker);
  text.replace(at, checksum_digits, checksum_with_zeros(text, at));
}

Seal seal_of(std::string text, std::string_view marker) {
  const std::size_t at = digits_at(text, marker);
  if (at == std::string_view::npos) return Seal::none;
  const std::string digits = text.substr(at, checksum_digits);
  return digits == checksum_with_zeros(text, at) ? Seal::whole : Seal::broken;
}

}  // namespace sherd
