// Foreign text in messages.
#pragma once

#include <string>
#include <string_view>

#include "runtime/export.h"

namespace sherd {

/// Text from a file or a command line, fit for one line: control characters as '?', and what is longer than
/// `limit` bytes cut before a whole character, with "..." for the rest.
SHERD_API std::string shown(std::string_view text, std::size_t limit = 100);

/// A message as one line, with its middle as "..." where it is longer than 2000 bytes: both ends say
/// something.
SHERD_API std::string one_line(std::string_view text);

}  // namespace sherd
