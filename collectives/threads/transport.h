// The transport of ranks that are threads of one process. A post holds addresses, and every rank reads what
// it needs from its peers' memory.
#pragma once

#include <memory>

#include "collectives/threads/crew.h"
#include "collectives/transport.h"

namespace sherd::threads {

class Core;

/// The group of all ranks of a crew; its ranks share the object.
std::shared_ptr<Core> make_world(std::shared_ptr<Crew> crew);
/// The end of `rank` in a group. Called on that rank's thread.
std::unique_ptr<Transport> make_end(std::shared_ptr<Core> core, int rank);
/// Returns when all queued calls of the calling rank are posted. CollectiveError.
void post_queued();

}  // namespace sherd::threads
