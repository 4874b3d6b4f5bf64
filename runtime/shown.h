// Text from outside the library (files, command lines, users' names) in messages.
#pragma once

#include <string>
#include <string_view>

#include "runtime/export.h"

namespace sherd {

/// `text` fit for one line: control characters become '?', and text longer than `limit` bytes is cut before a
/// whole UTF-8 character and ends in "...".
SHERD_API std::string shown(std::string_view text, std::size_t limit = 100);

/// `text` on one line: line breaks become spaces, other control characters '?'. Beyond 2000 bytes the middle
/// becomes "...", since a message says what failed at its beginning and why at its end.
SHERD_API std::string one_line(std::string_view text);

}  // namespace sherd
