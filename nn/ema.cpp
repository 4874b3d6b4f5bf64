#include "nn/ema.h"

#include <unordered_set>

#include "runtime/context.h"
#include "runtime/ops.h"

namespace sherd::nn {
namespace {

void check_same(const StateDict& state, const StateDict& averages) {
  check<StateError>(state.size() == averages.size(), "ema: {} values for {} averages", state.size(),
                    averages.size());
  for (std::size_t i = 0; i < state.size(); ++i)
    check<StateError>(
        state[i].first == averages[i].first && state[i].second.shape() == averages[i].second.shape(),
        "ema: '{}' of shape {} where '{}' of shape {} is averaged", state[i].first, state[i].second.shape(),
        averages[i].first, averages[i].second.shape());
}

}  // namespace

Ema::Ema(Module& module, double decay) : decay_(decay) {
  check<ValueError>(decay >= 0 && decay <= 1, "ema: a decay of {} is outside [0, 1]", decay);
  const NoGrad guard;
  for (const auto& [name, value] : module.state_dict()) averages_.emplace_back(name, clone(value));
}

void Ema::update(Module& module) {
  const StateDict state = module.state_dict();
  check_same(state, averages_);
  std::unordered_set<std::string> buffers;
  for (const NamedBuffer& buffer : module.named_buffers()) buffers.insert(buffer.name);
  const NoGrad guard;
  for (std::size_t i = 0; i < state.size(); ++i) {
    const Tensor &average = averages_[i].second, &value = state[i].second;
    if (buffers.contains(state[i].first) || !is_floating(average.dtype()))
      copy_(average, value);
    else
      add_(average, mul(sub(to(value, average.dtype()), average), 1 - decay_));
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
