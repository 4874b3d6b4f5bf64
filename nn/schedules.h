// Learning rates by the number of the step: `optimizer.set_lr(schedule(step))`. A schedule has no state but
// the step, which whoever counts steps saves; `PlateauSchedule` alone follows what it is told. One that is
// not here is a function of the step: a lambda.
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

/// Half a cosine from lr to min_lr over `first` steps, and again from lr on, each time over `factor` times as
/// many steps (Loshchilov and Hutter, 2017). ValueError for a `first` or a `factor` below 1, and a `min_lr`
/// above `lr`.
struct WarmRestartsSchedule {
  double lr = 1e-3, min_lr = 0;
  std::int64_t first = 1000, factor = 1;
  SHERD_API double operator()(std::int64_t step) const;
};

/// Which values of a metric are better.
enum class Better : std::uint8_t { lower, higher };
/// Whether a threshold is a part of the best value or a distance from it.
enum class Threshold : std::uint8_t { relative, absolute };

/// See `PlateauSchedule`.
struct PlateauOptions {
  double lr = 1e-3, factor = 0.1, min_lr = 0;
  std::int64_t patience = 10, cooldown = 0;
  Better better = Better::lower;
  double threshold = 1e-4;
  Threshold threshold_is = Threshold::relative;
};

/// A rate that falls when a metric no longer gets better: `optimizer.set_lr(schedule(loss))` after each
/// evaluation. After more than `patience` values in a row that are not better than the best one by the
/// threshold the rate is times `factor`, at least `min_lr`; the `cooldown` values behind it do not count.
/// Sharded ranks give the same metric, as an average over them. ValueError for a factor that is not below 1,
/// a negative number, and a metric that is NaN.
class SHERD_API PlateauSchedule {
 public:
  /// All that it knows, to be saved beside a run.
  struct State {
    double lr = 0, best = 0;
    std::int64_t waited = 0, cooling = 0;
    bool operator==(const State&) const = default;
  };
  explicit PlateauSchedule(PlateauOptions options = {});
  /// Takes the next value of the metric; the rate from now on.
  double operator()(double metric);
  double lr() const { return state_.lr; }
  const State& state() const { return state_; }
  void load_state(const State& state) { state_ = state; }

 private:
  bool is_better(double metric) const;

  PlateauOptions options_;
  State state_;
};

}  // namespace sherd::nn
