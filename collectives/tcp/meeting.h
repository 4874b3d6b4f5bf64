// How processes find each other without MPI: all come to the first one's port and get the doors of all.
#pragma once

#include "collectives/launch.h"
#include "collectives/processes/entrance.h"

namespace sherd::tcp {

/// What a process says when it comes; sent as these bytes.
struct Claim {
  std::array<char, 8> opening;
  std::int32_t rank, size;
  std::array<char, 16> token;  ///< a digest of the place's
  processes::Door door;
};
Claim claim_of(const Launch& launch, const MeetingPlace& place, const processes::Door& own);

/// Gives the others `own` and returns the doors of all, in the order of their ranks. Rank 0 listens at the
/// place; connections that do not know the token are refused, and logged. StateError when not all come within
/// `time`, when rank 0 cannot listen there, and for whom it refuses.
std::vector<processes::Door> meet(const Launch& launch, const MeetingPlace& place, const processes::Door& own,
                                  std::chrono::milliseconds time = processes::meeting_time);

}  // namespace sherd::tcp
