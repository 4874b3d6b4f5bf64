#include "runtime/shown.h"

#include <algorithm>

namespace sherd {
namespace {

bool continues_character(char c) { return (c & 0xc0) == 0x80; }

}  // namespace

std::string shown(std::string_view text, std::size_t limit) {
  std::string line(text.substr(0, limit));
  // Cut before a whole character, not inside it.
  if (text.size() > limit) {
    while (!line.empty() && continues_character(line.back())) line.pop_back();
    if (!line.empty() && (line.back() & 0x80) != 0) line.pop_back();
    line += "...";
  }
  std::ranges::replace_if(line, [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return line;
}

std::string one_line(std::string_view text) {
  constexpr std::size_t limit = 2000;
  std::string line(text);
  std::ranges::replace(line, '\n', ' ');
  if (line.size() <= limit) return shown(line, limit);
  std::size_t tail = line.size() - limit / 2;
  while (tail < line.size() && continues_character(line[tail])) ++tail;
  return shown(line, limit / 2) + shown(std::string_view(line).substr(tail), limit);
}

}  // namespace sherd
