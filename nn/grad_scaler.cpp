#include "nn/grad_scaler.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "autograd/capture/effects.h"
#include "collectives/observe.h"
#include "nn/norm_parts.h"
#include "nn/scaler_ranks.h"
#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/order_free_norm.h"

namespace sherd::nn {
namespace {

/// Scales by which a loss is multiplied and a gradient divided in f32.
constexpr double least_scale = 0x1p-126, most_scale = 0x1p126;

void check_scale(double scale) {
  check<ValueError>(scale >= least_scale && scale <= most_scale,
                    "GradScaler: scale {} must be from 2^-126 to 2^126, so that f32 holds it and its inverse",
                    scale);
}

Tensor is_scale(const Tensor& scale) {
  return logical_and(greater_equal(scale, least_scale), less_equal(scale, most_scale));
}

void check_options(const GradScalerOptions& o) {
  check_scale(o.init_scale);
  check<ValueError>(o.growth_factor > 1 && std::isfinite(o.growth_factor),
                    "GradScaler: growth factor {} must be above 1 and finite", o.growth_factor);
  check<ValueError>(o.backoff_factor > 0 && o.backoff_factor < 1,
                    "GradScaler: backoff factor {} must be above 0 and below 1", o.backoff_factor);
  check<ValueError>(o.growth_interval >= 1, "GradScaler: growth interval {} must be at least 1",
                    o.growth_interval);
}

/// The optimizer's gradients, a list for each device they are on.
std::vector<std::vector<Tensor>> gradients_of(const Optimizer& optimizer) {
  std::vector<std::vector<Tensor>> lists;
  for (std::size_t g = 0; g < optimizer.group_count(); ++g)
    for (const Parameter& p : optimizer.parameters(g)) {
      const Tensor gradient = p.grad();
      if (!gradient.defined()) continue;
      check<DTypeError>(gradient.dtype() != DType::f16,
                        "GradScaler: a gradient of shape {} is f16, in which unscaled values vanish; keep "
                        "parameters in f32 and compute in f16 (MixedPrecisionPolicy)",
                        gradient.shape());
      auto list = std::ranges::find(lists, gradient.device(), [](const auto& l) { return l[0].device(); });
      if (list == lists.end()) list = lists.insert(list, std::vector<Tensor>{});
      list->push_back(gradient);
    }
  return lists;
}

/// 1 where any is inf or NaN, 0-d f32.
Tensor any_not_finite(std::span<const std::vector<Tensor>> lists, Device device) {
  Tensor found = zeros({}, {DType::f32, device});
  for (const std::vector<Tensor>& list : lists) {
    const Tensor largest = apply_many(ops::LargestMagnitude{}, list)[0];
    found = maximum(found, to(to(logical_not(isfinite(largest)), DType::f32), device));
  }
  return found;
}

Tensor scalar_f64(double value) { return Tensor::scalar(value, {DType::f64, Device::cpu()}); }
Tensor scalar_i64(std::int64_t value) { return Tensor::scalar(value, {DType::i64, Device::cpu()}); }

}  // namespace

GradScaler::GradScaler(GradScalerOptions options) : options_(std::move(options)), compared_at_(renewals()) {
  check_options(options_);
  scale_ = Tensor::scalar(enabled() ? options_.init_scale : 1, {DType::f32, Device::cpu()});
  tracker_ = scalar_i64(0);
}

Tensor GradScaler::scale(const Tensor& loss) {
  sherd::detail::check_given("GradScaler::scale", loss);
  if (!enabled()) return loss;
  if (!std::exchange(used_, true)) {
    scale_ = to(scale_, loss.device());
    tracker_ = to(tracker_, loss.device());
  }
  const DType wide = loss.dtype() == DType::f64 ? DType::f64 : DType::f32;
  return mul(to(loss, wide), to(to(scale_, wide), loss.device()));
}

/// One factor for all: in f64 and rounded once, as PyTorch has it.
void GradScaler::divide(const Tensor& gradient) const {
  const Tensor factor = to(reciprocal(to(scale_, DType::f64)), gradient.device());
  if (gradient.dtype() == DType::f64 || gradient.dtype() == DType::f32)
    mul_(gradient, to(factor, gradient.dtype()));
  else
    copy_(gradient, mul(to(gradient, DType::f32), to(factor, DType::f32)));
}

GradScaler::Round* GradScaler::round_of(const Optimizer& optimizer) {
  const std::weak_ptr<const void> lifetime = optimizer.lifetime();
  const auto round =
      std::ranges::find_if(rounds_, [&](const Round& r) { return r.optimizer.lock() == lifetime.lock(); });
  return round == rounds_.end() ? nullptr : &*round;
}

/// What was begun before a fault is begun anew.
void GradScaler::forget_faulty_rounds() {
  if (std::exchange(renewals_of_rounds_, renewals()) != renewals()) rounds_.clear();
}

void GradScaler::remember(Optimizer& optimizer, const std::vector<Group>& sharers, std::string_view call) {
  const std::vector<int> ranks = ranks_in(sharers);
  std::erase_if(known_, [](const Known& k) { return k.alive.expired(); });
  if (options_.ranks.defined()) {
    for (const int rank : ranks)
      check<ValueError>(
          std::ranges::find(options_.ranks.world_ranks(), rank) != options_.ranks.world_ranks().end(),
          "GradScaler::{}: rank {} of the world shares a parameter and is not among the ranks "
          "given, {}; give all that take the same steps",
          call, rank, options_.ranks.world_ranks());
  } else {
    const bool alike =
        !ranks_ || (rounds_.empty() ? std::ranges::includes(*ranks_, ranks) : ranks == *ranks_);
    check<StateError>(
        alike,
        "GradScaler::{}: this optimizer's parameters are shared by {}, those of one that stepped "
        "before by {}, so that its scale may be another elsewhere; name all ranks: "
        "GradScaler({{.ranks = world.group()}})",
        call, name_of(ranks), name_of(ranks_.value_or(ranks)));
    ranks_ = ranks;
  }
  if (std::ranges::none_of(known_, [&](const Known& k) { return k.optimizer == &optimizer; }))
    known_.push_back({optimizer.lifetime(), &optimizer});
}

/// After a fault, before gradients are divided.
void GradScaler::compare(const std::vector<Group>& ranks) {
  const std::uint64_t now = renewals();
  if (now == compared_at_ || capturing_calls()) return;
  const auto updates = static_cast<double>(*updates_);
  ScalerStanding first{updates, scale_.item(), tracker_.item(), updates};
  for (const Group& group : ranks) first = foremost_of(group, first);
  compared_at_ = now;
  if (!first.unlike) return;
  *updates_ = static_cast<std::int64_t>(first.updates);
  fill_(scale_, first.scale);
  fill_(tracker_, first.tracker);
  for (const Known& known : known_)
    if (!known.alive.expired()) known.optimizer->zero_grad();
  rounds_.clear();
  fail<StateError>(
      "GradScaler: a fault cost some ranks an update, and this backward's gradients are of unlike scales: "
      "ranks have taken from {} to {} updates, this one {}, and all have the scale of most updates now, {}; "
      "gradients of the optimizers that it has seen are cleared, go on with the next backward",
      first.least_updates, first.updates, updates, first.scale);
}

GradScaler::Round& GradScaler::unscaled(Optimizer& optimizer, std::string_view call) {
  check<StateError>(used_, "GradScaler::{}: no loss was scaled yet; call scale(loss).backward() before",
                    call);
  for (std::size_t g = 0; g < optimizer.group_count(); ++g)
    for (const Parameter& p : optimizer.parameters(g))
      if (p.owner() != nullptr) p.owner()->check_steppable(p);
  const NoGrad guard;
  const std::vector<Group> sharers = sharers_of(optimizer);
  remember(optimizer, sharers, call);
  compare(options_.ranks.defined() ? std::vector{options_.ranks} : sharers);
  const std::vector<std::vector<Tensor>> lists = gradients_of(optimizer);
  for (const std::vector<Tensor>& list : lists)
    for (const Tensor& gradient : list) divide(gradient);
  for (std::size_t g = 0; g < optimizer.group_count(); ++g) note_scaled(optimizer.parameters(g));
  // Of the quotients, which are infinite for a scale below 1 where the gradients need not be.
  const Tensor found = any_not_finite(lists, scale_.device());
  tell_all(found, sharers);
  return rounds_.emplace_back(optimizer.lifetime(), found);
}

void GradScaler::unscale_(Optimizer& optimizer) {
  if (!enabled()) return;
  forget_faulty_rounds();
  const Round* round = round_of(optimizer);
  check<StateError>(round == nullptr,
                    "GradScaler::unscale_: this optimizer's gradients were {} since the last update(); call "
                    "it once, before step",
                    round != nullptr && round->stepped ? "stepped already" : "unscaled already");
  unscaled(optimizer, "unscale_");
}

Tensor GradScaler::step(Optimizer& optimizer) {
  if (!enabled()) {
    optimizer.step();
    return Tensor::scalar(0, {DType::f32, Device::cpu()});
  }
  forget_faulty_rounds();
  Round* round = round_of(optimizer);
  check<StateError>(round == nullptr || !round->stepped,
                    "GradScaler::step: this optimizer has stepped since the last update(); call update() "
                    "after each step");
  if (round == nullptr) round = &unscaled(optimizer, "step");
  const Tensor found = round->found;
  optimizer.step_unless(found);  // an optimizer of the program's own may call the scaler
  if (Round* const stepped = round_of(optimizer)) stepped->stepped = true;
  return found;
}

/// Of all optimizers of this update. Those of one are alike on its ranks.
Tensor GradScaler::found_by_any() const {
  Tensor found = zeros({}, {DType::f32, scale_.device()});
  for (const Round& round : rounds_) found = maximum(found, round.found);
  if (options_.ranks.defined()) tell_all(found, std::array{options_.ranks});
  return found;
}

void GradScaler::count_update() const {
  if (capturing()) repeat_in_replays([updates = updates_] { ++*updates; });
  ++*updates_;
}

void GradScaler::update() {
  if (!enabled()) return;
  const NoGrad guard;
  if (rounds_.empty() && options_.ranks.defined()) compare({options_.ranks});  // a rank without an optimizer
  check<StateError>(!rounds_.empty() || options_.ranks.defined(),
                    "GradScaler::update: no optimizer was unscaled or stepped since the last update(); call "
                    "step before");
  const Tensor found = found_by_any();
  const Tensor skipped = greater(found, 0), count = add(tracker_, 1);
  const Tensor grown = mul(scale_, options_.growth_factor), less = mul(scale_, options_.backoff_factor);
  const Tensor due = logical_and(greater_equal(count, options_.growth_interval), logical_not(skipped));
  const Tensor after = where(logical_and(due, is_scale(grown)), grown, scale_);
  copy_(scale_, where(logical_and(skipped, is_scale(less)), less, where(skipped, scale_, after)));
  copy_(tracker_, where(logical_or(skipped, due), zeros_like(count), count));
  count_update();
  rounds_.clear();
}

void GradScaler::update(double scale) {
  if (!enabled()) return;
  check_scale(scale);
  fill_(scale_, scale);
  ranks_.reset();
  count_update();
  rounds_.clear();
}

Tensor GradScaler::scale_tensor() const { return scale_; }

StateDict GradScaler::state_dict() const {
  if (!enabled()) return {};
  return {{"scale", scale_},
          {"growth_factor", scalar_f64(options_.growth_factor)},
          {"backoff_factor", scalar_f64(options_.backoff_factor)},
          {"growth_interval", scalar_i64(options_.growth_interval)},
          {"growth_tracker", tracker_}};
}

std::function<void()> GradScaler::stage_state_dict(const StateDict& state) {
  if (!enabled()) return [] {};
  constexpr std::array names = {"scale", "growth_factor", "backoff_factor", "growth_interval",
                                "growth_tracker"};
  std::unordered_map<std::string, double> values;
  for (const auto& [name, tensor] : state) {
    check<ValueError>(std::ranges::find(names, name) != names.end(),
                      "GradScaler: the state has '{}', which no scaler has", name);
    check<ValueError>(values.emplace(name, tensor.item()).second, "GradScaler: the state has '{}' twice",
                      name);
  }
  for (const char* name : names)
    check<ValueError>(values.contains(name), "GradScaler: the state lacks '{}'", name);
  const auto whole = [&](const char* name, double least) {
    const double value = values.at(name);
    check<ValueError>(value >= least && value == std::floor(value) && value < 0x1p53,
                      "GradScaler: '{}' is {}; it is a whole number from {} on", name, value, least);
    return static_cast<std::int64_t>(value);
  };
  GradScalerOptions options = options_;
  options.growth_factor = values.at("growth_factor");
  options.backoff_factor = values.at("backoff_factor");
  options.growth_interval = whole("growth_interval", 1);
  const std::int64_t tracker = whole("growth_tracker", 0);
  const double scale = values.at("scale");
  check_scale(scale);
  check_options(options);
  return [this, scale, tracker, options] {
    const NoGrad guard;
    fill_(scale_, scale);
    fill_(tracker_, tracker);
    *updates_ = 0;
    ranks_.reset();
    options_ = options;
  };
}

}  // namespace sherd::nn
