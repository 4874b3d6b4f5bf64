// The text that is trained on when none is named.
#pragma once

#include <string>
#include <vector>

namespace sherd::tools {

/// The sources and docs of this project: installed with the program, or the tree that it was built from.
/// Found from where the program lies, so that both may move together. ValueError where neither is there.
std::vector<std::string> default_text();

}  // namespace sherd::tools
