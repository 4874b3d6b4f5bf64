#include "nn/tokenizer/bytes.h"

#include <fmt/format.h>

#include <array>
#include <cstdint>

#include "nn/tokenizer/utf8.h"

namespace sherd::nn::tokens {
namespace {

bool is_printable(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

/// Others are numbered from U+0100 on, in order.
struct ByteAlphabet {
  std::array<char32_t, 256> characters{};
  std::array<std::int16_t, 0x180> bytes{};
  ByteAlphabet() {
    bytes.fill(-1);
    char32_t next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const char32_t character = is_printable(byte) ? static_cast<char32_t>(byte) : next++;
      characters[static_cast<std::size_t>(byte)] = character;
      bytes[character] = static_cast<std::int16_t>(byte);
    }
  }
};

const ByteAlphabet& byte_alphabet() {
  static const ByteAlphabet alphabet;
  return alphabet;
}

}  // namespace

char32_t character_of_byte(unsigned char byte) { return byte_alphabet().characters[byte]; }

std::optional<std::string> bytes_of_characters(std::string_view text) {
  std::string bytes;
  while (!text.empty()) {
    const Character c = first_character(text);
    if (c.code >= byte_alphabet().bytes.size() || byte_alphabet().bytes[c.code] < 0) return {};
    bytes.push_back(static_cast<char>(byte_alphabet().bytes[c.code]));
    text.remove_prefix(c.bytes);
  }
  return bytes;
}

std::string characters_of_bytes(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) append_utf8(text, character_of_byte(static_cast<unsigned char>(byte)));
  return text;
}

std::string byte_token(unsigned char byte) { return fmt::format("<0x{:02X}>", byte); }

std::optional<unsigned char> byte_of_token(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return {};
  int value = 0;
  for (const char c : token.substr(3, 2)) {
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                             : -1;
    if (digit < 0) return {};
    value = 16 * value + digit;
  }
  return static_cast<unsigned char>(value);
}

}  // namespace sherd::nn::tokens
