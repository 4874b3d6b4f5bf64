// Ctrl-C and a polite kill, heard between steps.
#pragma once

namespace sherd::tools {

/// Neither a reader of the output that goes away nor a file above the limit (`ulimit -f`) ends the program:
/// writing says so.
void ignore_output_signals();
/// From now on the first SIGINT, SIGTERM or SIGHUP is only noted, and so are those that follow within a
/// second. A later one ends the program, unless it is a launcher's rank: the launcher decides then.
void catch_interrupts();
/// Whether one came.
bool interrupted();

}  // namespace sherd::tools
