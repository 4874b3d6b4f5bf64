// Muon (Jordan et al., 2024): steps of matrices whose singular values are alike. It needs each matrix whole,
// which of sharded parameters it gathers for the moment of its step.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "nn/optimizer.h"

namespace sherd::shard {

/// By what a step is multiplied beside the rate, for a matrix (rows, columns): sqrt(max(1, rows / columns)),
/// or 0.2 sqrt(max(rows, columns)), by which its elements are as large as those of AdamW's step, so that
/// rates and decays for AdamW serve (Liu et al., 2025).
enum class MuonScale : std::uint8_t { original, like_adamw };

/// For `Muon`. ValueError for a number of iterations that is negative or above 99.
struct MuonOptions {
  double lr = 1e-3, momentum = 0.95, weight_decay = 0.1, eps = 1e-7;
  bool nesterov = true;
  int iterations = 5;  ///< of Newton and Schulz
  MuonScale scale = MuonScale::original;
  DType precision = DType::bf16;  ///< of the iterations, and of what is gathered
};

/// m = momentum m + (1 - momentum) g; u = momentum m + (1 - momentum) g again with `nesterov`, else m. p is
/// times 1 - lr weight_decay and moves by -lr scale O, where O is u with its singular values brought near 1:
/// `iterations` of X = 3.4445 X - 4.775 (X X^T) X + 2.0315 (X X^T)^2 X from u / |u|. Parameters are matrices
/// (ValueError for others: step embeddings, heads, norms and biases by `nn::AdamW` beside it). Options of
/// groups: "lr", "momentum", "weight_decay", "eps", "nesterov". State has the parameter's dtype, f32 for 16
/// bits.
///
/// Sharded or not, with the same bits given the same gradients: momenta lie in parts, as the parameters do,
/// and `step` is collective over the parameters' groups: it gathers u of one matrix at a time, in
/// `precision`, and every rank makes O. StateError for a matrix of which a rank has no element in the flat
/// layout, since that rank does not hear of its gradient; shard such modules per parameter.
class SHERD_API Muon final : public nn::Optimizer {
 public:
  Muon(std::vector<nn::ParamGroup> groups, MuonOptions options = {});
  Muon(std::vector<nn::Parameter> params, MuonOptions options = {})
      : Muon(std::vector<nn::ParamGroup>{{std::move(params)}}, options) {}

 protected:
  std::vector<std::string> state_names() const override { return {"momentum"}; }
  DType state_dtype(DType dtype) const override;
  void step_group(const Group& group, std::span<const nn::Parameter> params,
                  std::span<Slots* const> slots) override;

 private:
  MuonOptions options_;
};

/// Brings the singular values of a matrix near 1, into about [0.7, 1.2], in the dtype of `x`: `iterations` as
/// `Muon` makes them, from x / max(|x|, eps).
SHERD_API Tensor orthogonalized(const Tensor& x, int iterations = 5, double eps = 1e-7);

}  // namespace sherd::shard
