// Characters of UTF-8 text, sound or not.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/export.h"

namespace sherd::nn::tokens {

constexpr std::string_view replacement = "\xEF\xBF\xBD";  // U+FFFD

struct Character {
  char32_t code;        ///< U+FFFD where it is malformed
  std::uint32_t bytes;  ///< of a malformed one: as many as may begin a character, at least one
  bool sound;
};
/// The first character of a text that is not empty.
Character first_character(std::string_view text);

void append_utf8(std::string& text, char32_t code);

/// Bytes of `text` before the first that is malformed.
SHERD_API std::size_t sound_prefix(std::string_view text);

/// What becomes U+FFFD, once.
enum class Malformed { bytes, beginnings };  // each byte; or as many bytes as may begin a character
/// Appends `text`, whose malformed bytes become U+FFFD.
void append_repaired(std::string& to, std::string_view text, Malformed unit);

/// Bytes at the end of `text` that begin a character whose rest is missing.
std::size_t unfinished_suffix(std::string_view text);

/// Unicode's White_Space.
bool is_white_space(char32_t code);

/// Appends `text` with `to` in place of each `from`, which is not empty.
void append_replaced(std::string& out, std::string_view text, std::string_view from, std::string_view to);

}  // namespace sherd::nn::tokens
