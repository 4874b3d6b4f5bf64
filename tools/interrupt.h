// Ctrl-C and a polite kill, heard between steps.
#pragma once

namespace sherd::tools {

/// A reader of the output that goes away ends no training.
void ignore_closed_output();
/// From now on the first SIGINT, SIGTERM or SIGHUP is only noted, and so are those that follow within a
/// second. A later one ends the program, unless it is a launcher's rank: the launcher decides then.
void catch_interrupts();
/// Whether one came.
bool interrupted();

}  // namespace sherd::tools
