// The characters that stand for bytes in vocabularies: one each (GPT-2), or a token each, `<0x0A>` (Llama 2).
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace sherd::nn::tokens {

/// The character that stands for a byte in byte-level vocabularies: itself where it is printable.
char32_t character_of_byte(unsigned char byte);

/// The bytes that the characters of `text` stand for; none where one of them stands for no byte.
std::optional<std::string> bytes_of_characters(std::string_view text);

/// The reverse.
std::string characters_of_bytes(std::string_view bytes);

/// `<0x0A>`
std::string byte_token(unsigned char byte);
std::optional<unsigned char> byte_of_token(std::string_view token);

}  // namespace sherd::nn::tokens
