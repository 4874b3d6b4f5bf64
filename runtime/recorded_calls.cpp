#include "runtime/recorded_calls.h"

#include "runtime/call_among_ranks.h"
#include "runtime/lent_call.h"

namespace sherd {

LentCall::~LentCall() = default;
CallAmongRanks::~CallAmongRanks() = default;
RecordedCalls::~RecordedCalls() = default;

}  // namespace sherd
