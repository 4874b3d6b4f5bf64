// Optimizers that step within the backward, each group when its average has come.
#pragma once

#include "nn/optimizer.h"

namespace sherd::shard {

/// A scope in which every backward that averages also steps `optimizer`: each group when its average is here,
/// while those of other groups are still on their way. After the backward all is as if `optimizer.step()`
/// stood behind it, to the bit: gradients stay until they are cleared. Hooks after accumulation run at the
/// end of the backward as ever, and see stepped parameters. Groups that a backward does not average (without
/// synchronisation, or not reached) are not stepped.
///
/// What would come between an average and the step is a StateError for these parameters: `step` of any
/// optimizer, clipping, a GradScaler's step. When a backward throws, some groups may have been stepped, and
/// on some ranks only: go on from a checkpoint.
///
/// All parameters of the optimizer are sharded (ValueError), and it outlives the scope. One scope an
/// optimizer (StateError).
class SHERD_API StepInBackward {
 public:
  explicit StepInBackward(nn::Optimizer& optimizer);
  ~StepInBackward();
  StepInBackward(const StepInBackward&) = delete;
  StepInBackward& operator=(const StepInBackward&) = delete;

 private:
  nn::Optimizer* optimizer_;
};

}  // namespace sherd::shard
