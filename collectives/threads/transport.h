// Ranks that are threads of one process. Calls are posted as addresses; every rank takes what it needs from
// its peers' memory itself.
#pragma once

#include <memory>

#include "collectives/threads/crew.h"
#include "collectives/transport.h"

namespace sherd::threads {

class Core;

/// The group of all ranks of a crew, shared by them.
std::shared_ptr<Core> make_world(std::shared_ptr<Crew> crew);
/// `rank`'s end of a group; on that rank's thread.
std::unique_ptr<Transport> make_end(std::shared_ptr<Core> core, int rank);

}  // namespace sherd::threads
