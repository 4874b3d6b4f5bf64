// Learning rates by the number of the step: `optimizer.set_lr(schedule(step))`. A schedule has no state but
// the step, which whoever counts steps saves. One that is not here is a function of the step: a lambda.
#pragma once

#include <cstdint>

#include "runtime/export.h"

namespace sherd::nn {

// All take steps from 0 on (ValueError for a negative one).

/// The learning rate at `step`, from 0: linear warm-up over `warmup` steps to `lr`, then half a cosine
/// (Loshchilov and Hutter, 2017) down to `min_lr` at `steps`, and `min_lr` from there on. ValueError for a
/// negative `step`, a `min_lr` above `lr`, and a warm-up longer than `steps`.
struct CosineSchedule {
  double lr = 1e-3, min_lr = 1e-4;
  std::int64_t warmup = 100, steps = 2000;
  SHERD_API double operator()(std::int64_t step) const;
};

/// lr, times `factor` once more after each `every` steps.
struct StepSchedule {
  double lr = 1e-3;
  std::int64_t every = 1000;
  double factor = 0.1;
  SHERD_API double operator()(std::int64_t step) const;
};

/// From first_factor lr on a line to last_factor lr at `steps`, and that from there on.
struct LinearSchedule {
  double lr = 1e-3, first_factor = 1.0 / 3, last_factor = 1;
  std::int64_t steps = 5;
  SHERD_API double operator()(std::int64_t step) const;
};

/// From lr / first_divisor up to `lr` in the first `rise` of the steps, then down to the first rate divided
/// by last_divisor at the last step, both along half a cosine (Smith and Topin, 2019). ValueError beyond
/// `steps`.
struct OneCycleSchedule {
  double lr = 1e-3;
  std::int64_t steps = 1000;
  double rise = 0.3, first_divisor = 25, last_divisor = 1e4;
  SHERD_API double operator()(std::int64_t step) const;
};

}  // namespace sherd::nn
