// Adafactor (Shazeer and Stern, 2018): the squares of a matrix's gradients as the product of what its rows
// and its columns come to.
#pragma once

#include <string>
#include <vector>

#include "nn/optimizer.h"

namespace sherd::shard {

/// For `Adafactor`; the numbers and their defaults are those of `torch.optim.Adafactor`.
struct AdafactorOptions {
  double lr = 1e-2;           ///< the most that a step is, relative to the parameter
  double beta2_decay = -0.8;  ///< averages move by t^beta2_decay towards what step t brings
  double eps1 = 0;     ///< squares are at least its square; 0: as much as the parameter's dtype resolves
  double eps2 = 1e-3;  ///< parameters count as at least so large
  double d = 1;        ///< a step whose root mean square is above it is scaled down to it
  double weight_decay = 0;
  bool maximize = false;  ///< climbs: takes gradients with the other sign
};

/// p is times 1 - lr weight_decay and moves by -a u / max(1, rms(u) / d): u = g / sqrt(v), a = max(eps2,
/// rms(p)) min(lr, 1 / sqrt(t)). v of a vector or a number averages g^2 ("variance"). Of what has two
/// dimensions and more it is, for each matrix of the last two, the averages of its rows' mean squares
/// ("row_var") times those of its columns ("col_var"), over the mean of the former: so many numbers as the
/// sides have, in place of as many as the matrix. All of these are options of groups. State has the
/// parameter's dtype, f32 for 16 bits.
///
/// Every rank that shares a matrix keeps both of its statistics whole; they are sums, which the ranks agree
/// on: `step` is collective over the parameters' groups, two calls a group for all parameters together. On
/// several ranks steps are those of one but for the order of these sums. ValueError and StateError for flat
/// parameters and for one of which a rank has no element in the flat layout; shard per parameter.
class SHERD_API Adafactor final : public nn::Optimizer {
 public:
  Adafactor(std::vector<nn::ParamGroup> groups, AdafactorOptions options = {});
  Adafactor(std::vector<nn::Parameter> params, AdafactorOptions options = {})
      : Adafactor(std::vector<nn::ParamGroup>{{std::move(params)}}, options) {}

  nn::StateForm state_form(std::string_view name, const nn::Parameter& p) const override;

 protected:
  std::vector<std::string> state_names() const override { return {"row_var", "col_var", "variance", "step"}; }
  DType state_dtype(DType dtype) const override;
  void step_group(const Group& group, std::span<const nn::Parameter> params,
                  std::span<Slots* const> slots) override;
};

}  // namespace sherd::shard
