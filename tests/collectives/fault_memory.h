// What faults leave behind. Uses the library's public face only, so threads and processes run the same.
#pragma once

#include <cstdint>

#include "collectives/world.h"

namespace sherd::test {

/// So many calls of `elements` f32 fail, in every way in turn, and what failed is renewed or dropped; all
/// ranks of the world call it. Throws where anything of them is kept: tensors, or more other memory than a
/// constant.
void faults_leave_nothing(World& world, int faults, std::int64_t elements);

}  // namespace sherd::test
