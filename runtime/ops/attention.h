// Scaled dot-product attention (Vaswani et al., 2017) that does not store the weights (Dao et al., 2022); a
// library's gradient may, in up to 2 GiB of scratch memory.
#pragma once

#include "runtime/generator.h"
#include "runtime/op.h"

namespace sherd::ops {

/// What every form of attention shares.
struct AttentionRule {
  double scale = 1;
  bool causal = false;  ///< query i sees keys up to i + Tk - Tq
  double dropout = 0;
  RandomKey key;
  void fields(auto&& on) const {
    on("scale", scale);
    on("causal", causal);
    on("dropout", dropout);
    on("offset", key.offset);
  }
  bool operator==(const AttentionRule&) const = default;
};

/// Inputs: q (B, H, Tq, D), k and v (B, H, Tk, D). Outputs: (B, H, Tq, D), and the logsumexp of each row (B,
/// H, Tq) in f32.
struct Attention {
  static constexpr std::string_view name = "attention";
  static constexpr Arity arity = 3;
  static constexpr Reads reads{.inputs = 0b111, .outputs = 0b11};
  AttentionRule rule;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { rule.fields(on); }
  bool operator==(const Attention&) const = default;
};

/// Inputs: gradient of the output, q, k, v, output, logsumexp. Outputs: gradients of q, k, v.
struct AttentionGrad {
  static constexpr std::string_view name = "attention_grad";
  static constexpr Arity arity = 6;
  static constexpr bool differentiable = false;
  AttentionRule rule;

  Specs infer(SpecSpan in) const { return {in[1], in[2], in[3]}; }
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { rule.fields(on); }
  bool operator==(const AttentionGrad&) const = default;
};

/// Attention with what the plain one does not take. Inputs: q (B, H, Tq, D); k and v (B, G, Tk, D), each of
/// whose heads H / G neighbours of q's share; a mask, or none, that broadcasts to (B, H, Tq, Tk), bool (true
/// where a query sees a key) or added to the scores in q's dtype. Outputs: (B, H, Tq, D), zeros for a query
/// that sees no key, and what the device's gradient wants to know of each row, in f32: its logsumexp (1, B,
/// H, Tq); of scores to which a mask is added, relative to its largest score, which follows (2, B, H, Tq).
struct MaskedAttention {
  static constexpr std::string_view name = "masked_attention";
  static constexpr Arity arity = 4;
  static constexpr Mask optional = 0b1000;
  static constexpr Reads reads{.inputs = 0b1111, .outputs = 0b11};
  AttentionRule rule;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { rule.fields(on); }
  bool operator==(const MaskedAttention&) const = default;
};

/// Inputs: gradient of the output, q, k, v, mask or none, output, numbers of each row. Outputs: gradients of
/// q, k, v.
struct MaskedAttentionGrad {
  static constexpr std::string_view name = "masked_attention_grad";
  static constexpr Arity arity = 7;
  static constexpr Mask optional = 0b10000;
  static constexpr bool differentiable = false;
  AttentionRule rule;

  Specs infer(SpecSpan in) const { return {in[1], in[2], in[3]}; }
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { rule.fields(on); }
  bool operator==(const MaskedAttentionGrad&) const = default;
};

/// Self-attention on a packed projection: input (B, T, 3 H D) holding q, k and v, output (B, T, H D) and the
/// logsumexp (B, H, T). No copy in or out, and one gradient for the whole projection.
struct SelfAttention {
  static constexpr std::string_view name = "self_attention";
  static constexpr Mask dense = 1;
  static constexpr Reads reads{.inputs = 0b1, .outputs = 0b11};
  std::int64_t heads = 1;
  AttentionRule rule;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("heads", heads);
    rule.fields(on);
  }
  bool operator==(const SelfAttention&) const = default;
};

/// Inputs: gradient of the output, qkv, output, logsumexp. Output: gradient of qkv.
struct SelfAttentionGrad {
  static constexpr std::string_view name = "self_attention_grad";
  static constexpr Arity arity = 4;
  static constexpr Mask dense = 0b1111;
  static constexpr bool differentiable = false;
  std::int64_t heads = 1;
  AttentionRule rule;

  Specs infer(SpecSpan in) const { return {in[1]}; }
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("heads", heads);
    rule.fields(on);
  }
  bool operator==(const SelfAttentionGrad&) const = default;
};

}  // namespace sherd::ops
