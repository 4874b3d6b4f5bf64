// The wire over TCP: a connection to every other process.
#pragma once

#include "collectives/processes/entrance.h"
#include "collectives/processes/wire.h"

namespace sherd::tcp {

/// Connects all processes of `launch`, who meet at `place` within `time` as `Meeting` says.
std::unique_ptr<processes::Wire> connect(const Launch& launch, const MeetingPlace& place,
                                         std::chrono::milliseconds time = processes::meeting_time);

}  // namespace sherd::tcp
