#include "nn/schedules.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string_view>

#include "runtime/error.h"
#include "runtime/math.h"

namespace sherd::nn {
namespace {

void check_step(std::string_view schedule, std::int64_t step) {
  check<ValueError>(step >= 0, "{}: step {} is negative", schedule, step);
}

/// Half a cosine from `first` to `last`, at `part` of the way.
double along_cosine(double first, double last, double part) {
  return last + (first - last) / 2 * (1 + math::cos(std::numbers::pi * part));
}

}  // namespace

double StepSchedule::operator()(std::int64_t step) const {
  check_step("StepSchedule", step);
  check<ValueError>(every > 0, "StepSchedule: every {} steps; at least 1", every);
  return lr * math::pow(factor, static_cast<double>(step / every));
}

double LinearSchedule::operator()(std::int64_t step) const {
  check_step("LinearSchedule", step);
  const double part = steps > 0 ? std::min(1.0, static_cast<double>(step) / static_cast<double>(steps)) : 1;
  return lr * (first_factor + (last_factor - first_factor) * part);
}

double OneCycleSchedule::operator()(std::int64_t step) const {
  check_step("OneCycleSchedule", step);
  check<ValueError>(step < steps, "OneCycleSchedule: step {} of {}", step, steps);
  const double first = lr / first_divisor, at = static_cast<double>(step);
  const double top = rise * static_cast<double>(steps) - 1, end = static_cast<double>(steps) - 1;
  if (at <= top) return top > 0 ? along_cosine(first, lr, at / top) : lr;
  return along_cosine(lr, first / last_divisor, (at - top) / (end - top));
}

double CosineSchedule::operator()(std::int64_t step) const {
  check<ValueError>(step >= 0, "cosine schedule: step {} is before the first, 0", step);
  check<ValueError>(min_lr <= lr, "cosine schedule: min_lr {} is above lr {}; give both", min_lr, lr);
  check<ValueError>(warmup <= steps,
                    "cosine schedule: a warm-up of {} steps does not end within {}; give a shorter one",
                    warmup, steps);
  if (step < warmup) return lr * static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (step >= steps) return min_lr;
  const double done =
      static_cast<double>(step - warmup) / static_cast<double>(std::max<std::int64_t>(steps - warmup, 1));
  return min_lr + 0.5 * (lr - min_lr) * (1 + math::cos(std::numbers::pi * done));
}

}  // namespace sherd::nn
