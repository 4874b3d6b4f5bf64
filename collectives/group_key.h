// The bytes by which the ranks of a group find each other outside this library's calls.
#pragma once

#include <array>
#include <cstddef>

namespace sherd {

/// The same bytes on every rank of a group, and others for every other group, a renewed one too. As many as
/// device libraries take to make a communicator (ncclUniqueId).
using GroupKey = std::array<std::byte, 128>;

}  // namespace sherd
