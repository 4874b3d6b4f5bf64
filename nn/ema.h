// An average of a model over its training, which is often better than where the training ends.
#pragma once

#include "nn/module.h"

namespace sherd::nn {

/// average = decay average + (1 - decay) value of each parameter, by `update`; starts as the parameters are.
/// Averages of 16-bit parameters are kept in f32: in their own dtype small steps would be lost.
/// Saved buffers are copied. Of sharded parameters each rank averages its part. ValueError for a decay
/// outside [0, 1]; StateError when the module's state has other names or shapes than it had.
class SHERD_API Ema {
 public:
  explicit Ema(Module& module, double decay = 0.999);
  /// After a step: takes the values of `module`, which has the names and shapes of the one at the start.
  void update(Module& module);
  /// The averages by the names of the module's state, to save, or to load into a model:
  /// `model.load_state_dict(ema.state_dict())`. They share memory with this.
  const StateDict& state_dict() const { return averages_; }
  /// Goes on from saved averages. Errors as those of `Module::load_state_dict`.
  void load_state_dict(const StateDict& state);

 private:
  void step_towards(const Tensor& average, const Tensor& value) const;

  double decay_;
  StateDict averages_;
};

}  // namespace sherd::nn
