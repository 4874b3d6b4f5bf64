// Whose terminal an output is.
#pragma once

namespace sherd::tools {

/// Whether what is written to `fd` comes to a terminal of the user's, on which a line can be written over. A
/// terminal that a launcher made to read from, as mpirun does, is none: what comes out of it goes to wherever
/// the launcher writes, which `announce_terminal` tells.
bool is_terminal(int fd);

/// Tells the programs that this process starts whether its own output at `fd` comes to a terminal.
void announce_terminal(int fd);

}  // namespace sherd::tools
