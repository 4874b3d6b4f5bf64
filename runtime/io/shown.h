// Foreign text in messages.
#pragma once

#include <string>
#include <string_view>

#include "runtime/export.h"

namespace sherd {

/// Text from a file or a command line, fit for one line: control characters as '?', and what is longer than
/// `limit` bytes cut before a whole character, with "..." for the rest.
SHERD_API std::string shown(std::string_view text, std::size_t limit = 100);

}  // namespace sherd
