// What a rank brings when a group is made.
#pragma once

#include <cstdint>

#include "collectives/group_key.h"

namespace sherd {

/// All ranks of the group that a new one is cut from get it.
struct Offer {
  std::int64_t number = 0;  ///< the transport's
  GroupKey key{};           ///< of the new group, from its first member; else zeros
};

/// A key that no group has: random. StateError when the system has no random bytes.
GroupKey draw_group_key();

}  // namespace sherd
