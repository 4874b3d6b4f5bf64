#include "runtime/io/shown.h"

#include <algorithm>

namespace sherd {

std::string shown(std::string_view text, std::size_t limit) {
  std::string line(text.substr(0, limit));
  // Cut before a whole character, not inside it.
  if (text.size() > limit) {
    while (!line.empty() && (line.back() & 0xc0) == 0x80) line.pop_back();
    if (!line.empty() && (line.back() & 0x80) != 0) line.pop_back();
    line += "...";
  }
  std::ranges::replace_if(
      line, [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return line;
}

}  // namespace sherd
