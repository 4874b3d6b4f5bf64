// What of a model's gathered parameters stays, and how far ahead others are gathered, by the memory that they
// may take.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nn/module.h"
#include "runtime/export.h"

namespace sherd::shard {

/// What `plan_gathers` chose.
struct GatherPlan {
  /// Modules, by their names in the model, whose parameters stay from forward to backward now, beside those
  /// whose own options say so: their backwards gather nothing.
  std::vector<std::string> staying{};
  int ahead = 0;                ///< groups that are gathered before they are used, forward and backward
  std::int64_t peak_bytes = 0;  ///< the most that whole parameters take at once on a rank, in a step
};

/// Lets whole parameters take up to `bytes` on each rank: as many groups as there is room for stay from
/// forward to backward, those first whose backward comes first, and others are gathered as far ahead as is
/// left. It counts for all steps from here on, called, compiled and captured alike, until it is called again;
/// numbers stay to the bit. `model` is the outermost sharded module, whose last forward, with gradients, says
/// what is used when. On top of it come slices (`reshard_after_forward` of a number), what `unshard`,
/// `set_modules_to_forward_prefetch` and the like and `set_reshard_after_backward(false)` ask for, several
/// forwards before a backward, and parameters read outside their modules that a plan before this one left
/// where they were, so that nobody noticed. It makes the calls among ranks other ones, so it is collective
/// over the ranks of the model's groups. ValueError for less than the least that is possible, which it names,
/// and where ranks give different numbers; StateError where their forwards were not alike, before a forward
/// and where a module was cast or sharded anew since, within one or a backward, and for a module that is not
/// the outermost.
SHERD_API GatherPlan plan_gathers(nn::Module& model, std::int64_t bytes);

}  // namespace sherd::shard
