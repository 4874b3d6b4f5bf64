// Where the tensors of a rank lie, from a name that is the same on all of them.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "collectives/world.h"
#include "runtime/backend.h"

namespace sherd::test {

/// "cuda:each" is a GPU of the rank's own as far as there are enough, else shared by the fewest ranks, and so
/// is "late:each", of which there are enough; every other name is a device's.
inline Device rank_device(std::string_view name) {
  if (!name.ends_with(":each")) return Device::parse(name);
  const World* world = World::current_or_null();
  const int rank = world != nullptr ? world->local_rank() : 0;
  if (name == "cuda:each") return Device::cuda(rank % std::max(1, gpu_count()));
  return Device::parse(fmt::format("{}{}", name.substr(0, name.size() - 4), rank));
}

/// Why ranks cannot lie on the devices of that name here; empty where they can. `gpus`: how many "cuda:each"
/// must have to be another case than "cuda:0".
inline std::string why_not_here(std::string_view name, int gpus) {
  if (!name.starts_with("cuda")) return {};
  const int here = gpu_count();
  if (here == 0) return "no GPU here";
  return name == "cuda:each" && here < gpus ? fmt::format("{} GPUs needed, {} here", gpus, here) : "";
}

}  // namespace sherd::test
