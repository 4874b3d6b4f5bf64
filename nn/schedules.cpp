#include "nn/schedules.h"

#include <algorithm>
#include <cmath>
#include <limits>
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

double WarmRestartsSchedule::operator()(std::int64_t step) const {
  check_step("WarmRestartsSchedule", step);
  check<ValueError>(first >= 1 && factor >= 1,
                    "WarmRestartsSchedule: first {} and factor {}; both are at least 1", first, factor);
  check<ValueError>(min_lr <= lr, "WarmRestartsSchedule: min_lr {} is above lr {}; give both", min_lr, lr);
  std::int64_t length = first;
  if (factor == 1) step %= length;
  while (step >= length) {
    step -= length;
    if (__builtin_mul_overflow(length, factor, &length)) return lr;  // no run is as long as the next one
  }
  return along_cosine(lr, min_lr, static_cast<double>(step) / static_cast<double>(length));
}

PlateauSchedule::PlateauSchedule(PlateauOptions options) : options_(options) {
  check<ValueError>(options.factor >= 0 && options.factor < 1,
                    "PlateauSchedule: factor {} does not lower a rate; give one below 1", options.factor);
  check<ValueError>(options.lr >= 0 && options.min_lr >= 0 && options.threshold >= 0 &&
                        options.patience >= 0 && options.cooldown >= 0,
                    "PlateauSchedule: lr {}, min_lr {}, threshold {}, patience {} and cooldown {}; none is "
                    "negative",
                    options.lr, options.min_lr, options.threshold, options.patience, options.cooldown);
  constexpr double infinity = std::numeric_limits<double>::infinity();
  state_ = {options.lr, options.better == Better::lower ? infinity : -infinity, 0, 0};
}

bool PlateauSchedule::is_better(double metric) const {
  const double sign = options_.better == Better::lower ? -1 : 1;
  if (std::isinf(state_.best)) return sign * metric > sign * state_.best;
  const double bar = options_.threshold_is == Threshold::absolute
                         ? state_.best + sign * options_.threshold
                         : state_.best * (1 + sign * options_.threshold);
  return sign * metric > sign * bar;
}

double PlateauSchedule::operator()(double metric) {
  check<ValueError>(!std::isnan(metric),
                    "PlateauSchedule: the metric is NaN; tell it of finite losses alone");
  if (is_better(metric)) {
    state_.best = metric;
    state_.waited = 0;
  } else {
    ++state_.waited;
  }
  if (state_.cooling > 0) {
    --state_.cooling;
    state_.waited = 0;
  }
  if (state_.waited <= options_.patience) return state_.lr;
  constexpr double least_step = 1e-8;  // as PyTorch: less would go on for ever
  const double lower = std::max(state_.lr * options_.factor, options_.min_lr);
  if (state_.lr - lower > least_step) state_.lr = lower;
  state_.cooling = options_.cooldown;
  state_.waited = 0;
  return state_.lr;
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
