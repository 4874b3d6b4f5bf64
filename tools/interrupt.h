// Ctrl-C and a polite kill, heard between steps.
#pragma once

namespace sherd::tools {

/// From now on the first SIGINT or SIGTERM is only noted; the next one ends the program.
void catch_interrupts();
/// Whether one came.
bool interrupted();

}  // namespace sherd::tools
