// Checksums that tell a damaged file from a whole one. They protect against accidents, not against people.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "runtime/export.h"

namespace sherd {

/// Length of a checksum in characters.
inline constexpr std::size_t checksum_digits = 16;

/// XXH3 in 64 bits, as sixteen hexadecimal digits.
SHERD_API std::string checksum_of(std::span<const std::byte> bytes);

/// The state of a text that may hold its own checksum: none in it, correct, or wrong.
enum class Seal : std::uint8_t { none, whole, broken };

/// Writes the checksum of `text` over the sixteen characters after the first `marker`, which count as zeros;
/// the text must have them.
SHERD_API void seal(std::string& text, std::string_view marker);
/// The state of such a text; `none` where no marker is followed by sixteen characters.
SHERD_API Seal seal_of(std::string text, std::string_view marker);

}  // namespace sherd
