// Optimizers that step within the backward, each group when its average has come.
#pragma once

#include <memory>

#include "nn/optimizer.h"

namespace sherd::shard {

/// A scope in which every backward that averages also steps `optimizer`: each group when its average is here
/// and the backward reads its values no more, while it goes on; at its end those whose shard is not on the
/// host or is what they compute with, or whose average is made there (replicas of shards, communication
/// hooks, `zero1`). After the backward all is as if `optimizer.step()` stood behind it, to the bit: gradients
/// stay until they are cleared. Hooks after accumulation run at the end of the backward as ever, and see
/// stepped parameters. Groups that a backward does not average (without synchronisation, or not reached) are
/// not stepped.
///
/// What would come between an average and the step is a StateError for these parameters: `step` of any
/// optimizer, clipping, a GradScaler's `unscale_` and step. So is a hook in the backward that has whole
/// parameters gathered again when their gradient is complete; `local()` and `grad()` may be there from before
/// or after the step. An optimizer's step that makes a call among ranks is a StateError too, at the end of
/// the backward as whatever a step throws. When a backward throws, some groups may have been stepped, and on
/// some ranks only: go on from a checkpoint.
///
/// All parameters of the optimizer are sharded (ValueError; for those of a group that is added, in the next
/// backward), and it outlives the scope (StateError in a backward), which begins and ends between backwards.
/// One scope an optimizer (StateError).
class SHERD_API StepInBackward {
 public:
  explicit StepInBackward(nn::Optimizer& optimizer);
  ~StepInBackward();
  StepInBackward(const StepInBackward&) = delete;
  StepInBackward& operator=(const StepInBackward&) = delete;

 private:
  std::weak_ptr<const void> optimizer_;  ///< by lifetime: its address may be another's when the scope ends
};

}  // namespace sherd::shard
