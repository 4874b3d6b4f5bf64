// Scaled dot-product attention in f32 without a Tq x Tk matrix in memory: a few query rows at a time.
#pragma once

#include <cstdint>

#include "runtime/cpu/random.h"

namespace sherd::cpu {

/// A (batch, heads, rows, head width) tensor by strides, in elements; the head width is contiguous. So a
/// slice of a (B, T, 3, H, D) projection and a (B, T, H * D) output need no copy.
template <class T>
struct Heads {
  T* data = nullptr;
  std::int64_t batch = 0, head = 0, row = 0;
  std::int64_t share = 1;  ///< of the queries' heads, neighbours that one of these is for
};

/// What queries see beside causality, by strides of (batch, head, query) in elements, with contiguous keys:
/// either the keys that are not 0 in `seen`, or those whose `added` is not -inf. None where both are null.
struct AttentionMask {
  const std::uint8_t* seen = nullptr;
  const float* added = nullptr;  ///< to the scaled scores
  std::int64_t batch = 0, head = 0, row = 0;
};

/// What forward and backward share. Query row i sees the keys j <= i + keys - queries when causal (the last
/// query sees all keys), else all keys, of them those of the mask. A row that sees no key gives zeros.
struct Attention {
  std::int64_t batch = 0, heads = 0, queries = 0, keys = 0, width = 0;
  float scale = 1;
  bool causal = false;
  /// Probability of dropping a weight; weight (row, j) uses word j % 4 of the Philox counter
  /// `random.offset + row * ceil(keys / 4) + j / 4`, row = (batch index * heads + head) * queries + i.
  double dropout = 0;
  RandomKey random{};
  Heads<const float> q, k, v;
  AttentionMask mask{};
};

/// What backward needs to know of each row [batch, heads, queries]: the logsumexp of its scores, and with a
/// mask that is added, of which scores may be so large that a sum with them says nothing, the largest score
/// beside it, to which the logsumexp is relative; else `largest` is null.
template <class T>
struct AttentionRows {
  T* logsumexp = nullptr;
  T* largest = nullptr;
};

/// Writes o and rows. Throws OutOfMemoryError.
void attention(const Attention& a, Heads<float> o, AttentionRows<float> rows);

/// What backward reads and writes beside the inputs.
struct AttentionGradient {
  Heads<const float> o, go;
  AttentionRows<const float> rows;
  Heads<float> gq, gk, gv;  ///< written, not added to; with a head for each of the queries'
};
/// Throws OutOfMemoryError.
void attention_backward(const Attention& a, const AttentionGradient& g);

}  // namespace sherd::cpu
