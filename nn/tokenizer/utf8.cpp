#include "nn/tokenizer/utf8.h"

#include <cstring>

namespace sherd::nn::tokens {
namespace {

/// What may follow the first byte of a character: how many bytes, and from where to where the next one lies.
struct Lead {
  std::uint32_t more;
  unsigned char least, most;
};

Lead lead_of(unsigned char byte) {
  if (byte < 0xC2 || byte > 0xF4) return {0, 1, 0};
  if (byte < 0xE0) return {1, 0x80, 0xBF};
  if (byte < 0xF0)
    return {2, static_cast<unsigned char>(byte == 0xE0 ? 0xA0 : 0x80),
            static_cast<unsigned char>(byte == 0xED ? 0x9F : 0xBF)};
  return {3, static_cast<unsigned char>(byte == 0xF0 ? 0x90 : 0x80),
          static_cast<unsigned char>(byte == 0xF4 ? 0x8F : 0xBF)};
}

}  // namespace

Character first_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x80) return {byte(0), 1, true};
  Lead lead = lead_of(byte(0));
  char32_t code = byte(0) & (0x3FU >> lead.more);
  std::uint32_t read = 1;
  for (; read <= lead.more && read < text.size() && byte(read) >= lead.least && byte(read) <= lead.most;
       ++read) {
    code = code << 6 | (byte(read) & 0x3FU);
    lead.least = 0x80;
    lead.most = 0xBF;
  }
  if (lead.more == 0 || read <= lead.more) return {0xFFFD, read, false};
  return {code, read, true};
}

void append_utf8(std::string& text, char32_t code) {
  const auto add = [&](char32_t byte) { text.push_back(static_cast<char>(byte)); };
  const auto rest = [&](int shift) { add(0x80 | (code >> shift & 0x3F)); };
  if (code < 0x80) return add(code);
  if (code < 0x800) {
    add(0xC0 | code >> 6);
  } else if (code < 0x10000) {
    add(0xE0 | code >> 12);
    rest(6);
  } else {
    add(0xF0 | code >> 18);
    rest(12);
    rest(6);
  }
  rest(0);
}

std::size_t sound_prefix(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    if (std::uint64_t eight = 0; text.size() - at >= sizeof eight) {
      std::memcpy(&eight, text.data() + at, sizeof eight);
      if ((eight & 0x8080808080808080U) == 0) {
        at += sizeof eight;
        continue;
      }
    }
    const Character c = first_character(text.substr(at));
    if (!c.sound) break;
    at += c.bytes;
  }
  return at;
}

void append_repaired(std::string& to, std::string_view text, Malformed unit) {
  while (true) {
    const std::size_t sound = sound_prefix(text);
    to.append(text.substr(0, sound));
    text.remove_prefix(sound);
    if (text.empty()) return;
    to.append(replacement);
    text.remove_prefix(unit == Malformed::bytes ? 1 : first_character(text).bytes);
  }
}

std::size_t unfinished_suffix(std::string_view text) {
  for (std::size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const std::string_view end = text.substr(text.size() - back);
    const auto first = static_cast<unsigned char>(end[0]);
    if (first < 0x80) return 0;
    if (first < 0xC0) continue;
    const Character c = first_character(end);
    return !c.sound && c.bytes == back && lead_of(first).more >= back ? back : 0;
  }
  return 0;
}

bool is_white_space(char32_t code) {
  return (code >= 0x9 && code <= 0xD) || code == 0x20 || code == 0x85 || code == 0xA0 || code == 0x1680 ||
         (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 || code == 0x202F ||
         code == 0x205F || code == 0x3000;
}

void append_replaced(std::string& out, std::string_view text, std::string_view from, std::string_view to) {
  for (std::size_t found; (found = text.find(from)) != std::string_view::npos;) {
    out.append(text.substr(0, found)).append(to);
    text.remove_prefix(found + from.size());
  }
  out.append(text);
}

}  // namespace sherd::nn::tokens
