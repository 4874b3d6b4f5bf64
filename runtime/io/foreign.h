// What a file is that is not what it was taken for.
#pragma once

#include <string_view>

namespace sherd {

/// Of the first bytes of a file that is opened as a model's: what other file it is, and what to do. Empty for
/// one that is not known.
std::string_view foreign_file(std::string_view beginning);

}  // namespace sherd
