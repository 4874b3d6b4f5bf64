// Training in f16: the loss is scaled up so that small gradients do not vanish, and steps whose gradients
// overflowed are skipped.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "collectives/group.h"
#include "nn/optimizer.h"

namespace sherd::nn {

/// Whether a GradScaler scales, or every call of it does nothing but step.
enum class Scaling : std::uint8_t { on, off };

/// For `GradScaler`. ValueError unless the scale is positive and it and its inverse are finite and not 0 in
/// f32, growth above 1, backoff between 0 and 1 and the interval at least 1.
struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2, backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;  ///< steps in a row without overflow, after which the scale grows
  Scaling scaling = Scaling::on;
  /// All who take the same steps, where the parameters of each optimizer do not tell: with experts over some
  /// ranks and the rest over all in optimizers of their own, with stages of a pipeline, and where some ranks
  /// lack an optimizer. `update` and the comparison after a renewal are over them. Undefined: the ranks that
  /// share parameters, the same for all optimizers.
  Group ranks{};
};

/// Scales losses and unscales gradients (Micikevicius et al., 2018), with the meaning of PyTorch's scaler:
///
///     scaler.scale(loss).backward();
///     scaler.unscale_(optimizer);  // only where gradients are looked at, as clipping does
///     shard::clip_grad_norm_(model.parameters(), 1.0);
///     scaler.step(optimizer);
///     scaler.update();
///
/// A step is skipped when any gradient of its optimizer, on any rank that shares one of its parameters, has
/// an inf or a NaN. Those ranks call `unscale_` (or `step`) alike, whatever gradients each has, and agree on
/// every skip; so they do on every scale, if each optimizer has the same ranks or `GradScalerOptions::ranks`
/// names all. Scale and counts live on the device of the first loss that was scaled. The optimizers of this
/// library look there whether to skip, so no call waits for the device, and a scaled step can be captured;
/// for an optimizer that does not, `step` reads it (`Optimizer::step_unless`). The first `unscale_` or `step`
/// after a rank renewed a group compares scales and updates. Where a fault cost some ranks an update, all
/// take the scale of the one with most of them, gradients, which are of unlike scales, are cleared in every
/// optimizer that this scaler has seen, and all throw StateError; the next backward goes on.
class SHERD_API GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});

  /// The loss times the scale, in f32 (a loss in f64 stays so).
  Tensor scale(const Tensor& loss);
  /// Divides the optimizer's gradients by the scale, once between two updates (StateError), and remembers
  /// whether all are finite. StateError when nothing was scaled yet, DTypeError for gradients in f16, which
  /// would lose what the scale saved: keep f32 masters. ValueError where `GradScalerOptions::ranks` lacks a
  /// rank that shares a parameter, StateError where it is undefined and the optimizer has other ranks than
  /// those that were unscaled since the last update, or ranks that the one before these had not.
  void unscale_(Optimizer& optimizer);
  /// Unscales, unless that was done, and steps unless a gradient is not finite: the result (0-d f32) is 1
  /// where the step was skipped. Once between two updates (StateError).
  Tensor step(Optimizer& optimizer);
  /// After all optimizers have stepped: a skipped step multiplies the scale by `backoff_factor`,
  /// `growth_interval` steps in a row by `growth_factor`, unless that is a scale that options may not have.
  /// StateError when nothing was unscaled since the last update.
  void update();
  /// The same, with this scale in place of one that follows from the steps. ValueError as for `init_scale`.
  void update(double scale);

  /// The scale as a tensor (0-d f32) on its device; 1 when scaling is off. Later updates change it in place.
  Tensor scale_tensor() const;
  /// The scale as a number, for which it waits for the device.
  double get_scale() const { return scale_tensor().item(); }
  bool enabled() const { return options_.scaling == Scaling::on; }
  const GradScalerOptions& options() const { return options_; }

  /// "scale" (f32), "growth_factor", "backoff_factor" (f64), "growth_interval" and "growth_tracker" (i64),
  /// all 0-d; empty when scaling is off. Scale and tracker share memory with the scaler.
  StateDict state_dict() const;
  /// Takes over all of them. ValueError for missing or unknown names, those that come twice, and values that
  /// options may not have. Nothing is changed when it throws. Does nothing when scaling is off.
  void load_state_dict(const StateDict& state) { stage_state_dict(state)(); }
  /// The same in two steps: throws what is refused, and gives what takes the state over.
  std::function<void()> stage_state_dict(const StateDict& state);

 private:
  /// What was done for an optimizer since the last update.
  struct Round {
    std::weak_ptr<const void> optimizer;  ///< by lifetime, not by address
    Tensor found;                         ///< 0-d f32: not 0 where a gradient is not finite
    bool stepped = false;
  };
  /// An optimizer that this scaler has seen.
  struct Known {
    std::weak_ptr<const void> alive;
    Optimizer* optimizer;
  };
  Round* round_of(const Optimizer& optimizer);
  Round& unscaled(Optimizer& optimizer, std::string_view call);
  void remember(Optimizer& optimizer, const std::vector<Group>& sharers, std::string_view call);
  void compare(const std::vector<Group>& ranks);
  Tensor found_by_any() const;
  void forget_faulty_rounds();
  void count_update() const;
  void divide(const Tensor& gradient) const;

  GradScalerOptions options_;
  Tensor scale_, tracker_;                                                     ///< 0-d f32, 0-d i64
  bool used_ = false;                                                          ///< a loss was scaled
  std::shared_ptr<std::int64_t> updates_ = std::make_shared<std::int64_t>(0);  ///< since the scale was loaded
  std::uint64_t compared_at_;  ///< renewals of this rank's groups after which its ranks were alike
  std::uint64_t renewals_of_rounds_ = 0;
  std::vector<Known> known_;
  /// Of the world, on which the scale is alike: those that shared parameters of the last optimizer. None
  /// where it was set and no optimizer has stepped since, so that it is alike everywhere.
  std::optional<std::vector<int>> ranks_;
  std::vector<Round> rounds_;  ///< in the order of the calls, alike on all ranks
};

}  // namespace sherd::nn
