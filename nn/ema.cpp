#include "nn/ema.h"

#include <unordered_set>

#include "runtime/context.h"
#include "runtime/ops.h"

namespace sherd::nn {
namespace {

void check_same(const StateDict& state, const StateDict& averages) {
  check<StateError>(state.size() == averages.size(),
                    "ema: {} values for {} averages; update it with the model that it was made of",
                    state.size(), averages.size());
  for (std::size_t i = 0; i < state.size(); ++i)
    check<StateError>(
        state[i].first == averages[i].first && state[i].second.shape() == averages[i].second.shape(),
        "ema: '{}' of shape {} where '{}' of shape {} is averaged", state[i].first, state[i].second.shape(),
        averages[i].first, averages[i].second.shape());
}

/// What is copied, not averaged.
std::unordered_set<std::string> names_of_buffers(const Module& module) {
  std::unordered_set<std::string> names;
  for (const NamedBuffer& buffer : module.named_buffers()) names.insert(buffer.name);
  return names;
}

}  // namespace

Ema::Ema(Module& module, double decay) : decay_(decay) {
  check<ValueError>(decay >= 0 && decay <= 1, "ema: a decay of {} is outside [0, 1]", decay);
  const NoGrad guard;
  const std::unordered_set<std::string> buffers = names_of_buffers(module);
  for (const auto& [name, value] : module.state_dict()) {
    const bool averaged = !buffers.contains(name) && is_floating(value.dtype());
    const Tensor wide = averaged ? to(value, compute_dtype(value.dtype())) : value;
    averages_.emplace_back(name, wide.is(value) ? clone(value) : wide);
  }
}

/// From its nearer end, which is not lost then however far apart the two are.
void Ema::step_towards(const Tensor& average, const Tensor& value) const {
  if (decay_ == 0) return void(copy_(average, value));
  if (decay_ == 1) return;
  if (decay_ < 0.5)
    copy_(average, add(value, mul(sub(average, value), decay_)));
  else
    add_(average, mul(sub(value, average), 1 - decay_));
}

void Ema::update(Module& module) {
  const StateDict state = module.state_dict();
  check_same(state, averages_);
  const std::unordered_set<std::string> buffers = names_of_buffers(module);
  const NoGrad guard;
  for (std::size_t i = 0; i < state.size(); ++i) {
    const Tensor &average = averages_[i].second, &value = state[i].second;
    if (buffers.contains(state[i].first) || !is_floating(average.dtype()))
      copy_(average, value);
    else
      step_towards(average, to(value, average.dtype()));
  }
}

void Ema::load_state_dict(const StateDict& state) {
  for (const auto& [name, average] : averages_) {
    const Tensor& value = state.at(name);
    check<ShapeError>(value.shape() == average.shape(), "ema: '{}' has shape {}, its average {}", name,
                      value.shape(), average.shape());
  }
  check<ValueError>(state.size() == averages_.size(), "ema: {} values for {} averages", state.size(),
                    averages_.size());
  const NoGrad guard;
  for (const auto& [name, average] : averages_) copy_(average, state.at(name));
}

}  // namespace sherd::nn
