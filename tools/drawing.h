// A placement as a picture: a bar a segment, a colour a rank, padding hatched.
#pragma once

#include <string>

#include "tools/inspect.h"

namespace sherd::tools {

/// An SVG document; the same text for the same placement.
std::string drawing(const Placement& placement);

}  // namespace sherd::tools
