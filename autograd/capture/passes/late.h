// Pass: ops run just before what reads them, so that fewer values wait.
#pragma once

#include "autograd/capture/recorded.h"

namespace sherd {

/// Moves each op behind those that need it not, to the first one that does, where what it gives takes at
/// least the memory of what then has to wait for it: so what a backward makes again is made when it comes to
/// it. An op stays that writes, whose memory anybody writes or the caller or the other half gets, that asks
/// an owner or calls among ranks; one that reads memory which others have too stays between the same effects
/// and writes to such memory.
Recorded late(Recorded program);

}  // namespace sherd
