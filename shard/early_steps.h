// The optimizers of a rank that step within backwards.
#pragma once

#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "nn/optimizer.h"

namespace sherd::shard {

class ParameterGroup;

class EarlySteps {
 public:
  static EarlySteps& current();

  void add(nn::Optimizer& optimizer);
  void remove(const nn::Optimizer& optimizer) noexcept;

  /// A backward is about to commit its averages: says whether anything is stepped by them.
  bool begin();
  /// Steps the group's parameters, whose averages are in `.grad`.
  void step(const ParameterGroup& group);
  /// Whether only this may step the parameter now.
  bool claims(const nn::Parameter& parameter) const;

 private:
  struct Stepper {
    nn::Optimizer* optimizer;
    std::unordered_set<const void*> ids{};
    std::unordered_map<const ParameterGroup*, std::vector<nn::Parameter>> parameters{};  ///< by this backward
  };
  std::vector<Stepper> steppers_;
  bool stepping_ = false;
};

}  // namespace sherd::shard
