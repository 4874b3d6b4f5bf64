// The library's log, which has a listener here.
#pragma once

namespace sherd::tools {

/// From now on its warnings are lines "sherd: ..." on stderr. Called once.
void show_log();

}  // namespace sherd::tools
