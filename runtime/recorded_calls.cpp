#include "runtime/recorded_calls.h"

namespace sherd {

RecordedCalls::~RecordedCalls() = default;

std::shared_ptr<RecordedCalls> AnyOp::recorded_calls(std::span<const CapturedCall>) const { return nullptr; }

}  // namespace sherd
