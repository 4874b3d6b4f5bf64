// Training in f16 with a GradScaler, of which threads and processes must see the same.
#pragma once

#include "collectives/world.h"

namespace sherd::test {

/// Trains a small net in every way of sharding, while one rank after another has an inf or a NaN in its part
/// of a gradient, and in f16 with scales that overflow. Throws RankFailure where a rank's step, or its scale,
/// is not that of all, or a skipped step changed anything. Returns how many steps were skipped.
int check_scaled_runs(World& world);

}  // namespace sherd::test
