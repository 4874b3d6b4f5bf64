// The pass that drops what nobody reads.
#pragma once

#include "autograd/capture/recorded.h"

namespace sherd {

/// The program without ops of which nobody reads a result: no later op that stays, no caller, no other half.
/// Stays what writes memory that was there before or leaves the program, what has no results, and calls among
/// ranks. Random numbers of the ops that stay, and those that the program uses up, are as before.
Recorded dead_code(Recorded program);

}  // namespace sherd
