// The bytes by which the ranks of a group find each other outside this library's calls.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace sherd {

/// The same bytes on every rank of a group, and others for every other group, a renewed one too. As many as
/// device libraries take to make a communicator (ncclUniqueId).
using GroupKey = std::array<std::byte, 128>;

/// A key that no group has: random. StateError when the system has no random bytes.
GroupKey draw_group_key();

/// What a rank brings when groups are made; all ranks of the group that they are cut from get it.
struct Offer {
  std::int64_t number = 0;  ///< the transport's
  GroupKey key{};           ///< of the group, from its first member; else zeros
};

}  // namespace sherd
