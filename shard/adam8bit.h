// Adam whose moments are kept in 8 bits (Dettmers et al., 2022).
#pragma once

#include <span>
#include <string>
#include <vector>

#include "nn/optimizer.h"

namespace sherd::shard {

/// For `Adam8bit`.
struct Adam8bitOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool maximize = false;  ///< climbs: takes gradients with the other sign
};

/// AdamW, but m ("exp_avg") and v ("exp_avg_sq") of a parameter with `least_quantised` elements or more are
/// kept as one byte an element, the place of the nearest number in `dynamic_code` (signed for m) for what the
/// element is of the largest in its block, and one f32 a block, that largest ("exp_avg_absmax",
/// "exp_avg_sq_absmax"). Others are in f32. Steps are computed in f64 from what is kept, and move parameters
/// by the moments before they are rounded. Options of groups: "lr", "beta1", "beta2", "eps", "weight_decay",
/// "maximize".
///
/// Blocks are `block` elements of the whole parameter in row-major order, whoever has them: what is kept has
/// the same bits at every number of ranks and in every layout, given the same gradients. Where a shard ends
/// within a block, the ranks agree on its largest: `step` is collective then, one call a group for all
/// parameters together, and is refused for flat parameters and for one of which a rank has no element
/// (ValueError, StateError).
class SHERD_API Adam8bit final : public nn::Optimizer {
 public:
  static constexpr std::int64_t block = 256, least_quantised = 4096;

  Adam8bit(std::vector<nn::ParamGroup> groups, Adam8bitOptions options = {});
  Adam8bit(std::vector<nn::Parameter> params, Adam8bitOptions options = {})
      : Adam8bit(std::vector<nn::ParamGroup>{{std::move(params)}}, options) {}

  nn::StateForm state_form(std::string_view name, const nn::Parameter& p) const override;

 protected:
  std::vector<std::string> state_names() const override {
    return {"exp_avg", "exp_avg_sq", "exp_avg_absmax", "exp_avg_sq_absmax", "step"};
  }
  void step_group(const Group& group, std::span<const nn::Parameter> params,
                  std::span<Slots* const> slots) override;
};

/// Whether codes stand for numbers of both signs.
enum class CodeSign : std::uint8_t { both, positive };
/// The 256 numbers in [-1, 1], ascending, that bytes stand for: 0, 1, and for each of seven powers of ten
/// from 1e-6 to 1 the middles of equal parts of [0.1, 1] times it, of 1, 2, 4, ... 64 parts and with both
/// signs, or, of positive numbers alone, of twice as many.
SHERD_API std::span<const float> dynamic_code(CodeSign sign);

}  // namespace sherd::shard
