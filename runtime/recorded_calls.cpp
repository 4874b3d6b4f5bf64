#include "runtime/recorded_calls.h"

#include "runtime/lent_call.h"

namespace sherd {

LentCall::~LentCall() = default;
RecordedCalls::~RecordedCalls() = default;

std::shared_ptr<RecordedCalls> AnyOp::recorded_calls(std::span<const CapturedCall>) const { return nullptr; }

}  // namespace sherd
