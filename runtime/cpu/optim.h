// Optimizer steps over a whole list of parameters at once, and a gradient norm that no order of summation
// changes.
#pragma once

#include <cstdint>
#include <span>

#include "runtime/dtype.h"

namespace sherd::cpu {

/// One parameter with its gradient and Adam's moments, `n` elements each (0 is fine). `step` counts from 1
/// and is the parameter's own, because a step without a gradient does not count.
struct AdamSlot {
  float* p = nullptr;
  const float* g = nullptr;
  float *m = nullptr, *v = nullptr;
  std::int64_t n = 0;
  double step = 1;
};
/// The numbers of one call, for all its slots.
struct AdamCall {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool decoupled = false;  ///< AdamW: decay shrinks the parameter instead of adding to the gradient
};
/// One step of Adam or AdamW for all slots: m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g^2 as
/// published, so that a beta of 0 forgets all that was before.
void adam(std::span<const AdamSlot> slots, const AdamCall& call);

struct SgdSlot {
  float* p = nullptr;
  const float* g = nullptr;
  float* momentum = nullptr;  ///< null without momentum
  std::int64_t n = 0;
  bool first = false;  ///< the momentum holds nothing yet and starts as the gradient
};
/// The numbers of one call, for all its slots.
struct SgdCall {
  double lr = 1e-3, momentum = 0, weight_decay = 0, dampening = 0;
  bool nesterov = false;
};
void sgd(std::span<const SgdSlot> slots, const SgdCall& call);

struct RmspropSlot {
  float* p = nullptr;
  const float* g = nullptr;
  float* squares = nullptr;
  float* average = nullptr;   ///< of gradients; null unless centred, alike in all slots
  float* momentum = nullptr;  ///< null without momentum, alike in all slots
  std::int64_t n = 0;
};
struct RmspropCall {
  double lr = 1e-2, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
};
void rmsprop(std::span<const RmspropSlot> slots, const RmspropCall& call);

/// A stretch of `n` values for the norm; T is double, float, Half or BFloat16.
template <class T>
struct Values {
  const T* data = nullptr;
  std::int64_t n = 0;
};

/// Largest absolute value; 0 for none, NaN when there is one.
template <class T>
double max_abs(std::span<const Values<T>> list);
/// Adds the squares to `limbs`, as `ExactSquares` has them.
template <class T>
void add_squares(std::span<const Values<T>> list, std::int64_t* limbs);

/// x *= factor over a list (the clipping of gradients), in one pass.
template <class T>
struct MutableValues {
  T* data = nullptr;
  std::int64_t n = 0;
};
template <class T>
void scale(std::span<const MutableValues<T>> list, double factor);

}  // namespace sherd::cpu
