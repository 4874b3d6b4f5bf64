// What attention's kernels on tensor cores share.
#pragma once

#include "runtime/cuda/attention.cuh"
#include "runtime/cuda/mma.cuh"

namespace sherd::cuda {

inline constexpr int attention_threads = 128;  // four warps
inline constexpr float log2_of_e = 1.44269504f, ln_of_2 = 0.693147181f;

/// Scores go through powers of two. Their factor is applied inside the exponent; one that is not positive is
/// applied before, so that the largest product is the largest score, and so is one of scores to which a mask
/// is added.
struct ScoreScale {
  float before, inside;
  __device__ explicit ScoreScale(const AttentionCall& c) {
    const bool late = c.scale > 0 && c.mask.kind != MaskKind::adds;
    before = late ? 1.f : c.scale * log2_of_e;
    inside = late ? c.scale * log2_of_e : 1.f;
  }
};

__device__ inline const std::uint16_t* bits_of(const HeadIndex& head, const HeadsAt& x) {
  return head.rows<const std::uint16_t>(x);
}
__device__ inline const std::uint16_t* shared_bits(const AttentionCall& c, const HeadIndex& head,
                                                   const HeadsAt& x) {
  return head.shared_rows<const std::uint16_t>(c, x);
}

/// A number of a mask in powers of two.
template <class T>
__device__ float log2_bias(T x) {
  return bias_of(widen(x)) * log2_of_e;
}
template <class T>
__device__ float2 log2_biases(const HeadMask& mask, const T* row, int j) {
  const auto bits = mask.pair<std::uint32_t>(row, j);
  return {log2_bias(T::from_bits(static_cast<std::uint16_t>(bits))),
          log2_bias(T::from_bits(static_cast<std::uint16_t>(bits >> 16)))};
}

/// Which scores of a tile of C a bool mask shows, as bits: rows are the queries i + g and + 8, columns keys
/// from `key` on.
__device__ inline unsigned shown_to_queries(const HeadMask& mask, int i, int key) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size, j = key + lane % 4 * 2;
  unsigned shown = 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const unsigned two = mask.pair<std::uint16_t>(mask.row<std::uint8_t>(i + lane / 4 + 8 * h), j);
    shown |= ((two & 0xff) != 0 ? 1u : 0u) << 2 * h | (two >> 8 != 0 ? 2u : 0u) << 2 * h;
  }
  return shown;
}
/// The same where rows are the keys `key` + g and + 8, columns queries from `i` on.
__device__ inline unsigned shown_to_keys(const HeadMask& mask, int i, int key) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  unsigned shown = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e)
    shown |= (mask.at<std::uint8_t>(i + lane % 4 * 2 + e % 2, key + lane / 4 + e / 2 * 8) != 0 ? 1u : 0u)
             << e;
  return shown;
}

/// Which weights of a tile of C stay, as bits: rows are the queries `row` + g and + 8 (counted over all
/// heads), columns keys from `key` on. Neighbouring threads need the same counters: each makes one and gives
/// half of it.
__device__ inline unsigned kept_of_queries(const AttentionCall& c, std::int64_t row, int key) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size, t = lane % 4;
  const bool odd = t % 2 != 0;
  const PhiloxWords w = weight_words(c, row + lane / 4 + (odd ? 8 : 0), key + 2 * t);
  const std::uint32_t got0 = __shfl_xor_sync(whole_warp, odd ? w[0] : w[2], 1);
  const std::uint32_t got1 = __shfl_xor_sync(whole_warp, odd ? w[1] : w[3], 1);
  const std::uint32_t own0 = odd ? w[2] : w[0], own1 = odd ? w[3] : w[1];
  const auto bit = [&](std::uint32_t word, int i) { return word < c.threshold ? 0u : 1u << i; };
  return bit(odd ? got0 : own0, 0) | bit(odd ? got1 : own1, 1) | bit(odd ? own0 : got0, 2) |
         bit(odd ? own1 : got1, 3);
}

/// The same where rows are the keys `key` + g and + 8, columns queries from `row` on. Four threads share four
/// counters: each makes one, and they exchange words.
__device__ inline unsigned kept_of_keys(const AttentionCall& c, std::int64_t row, int key) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size, g = lane / 4, t = lane % 4, own = g % 4;
  const PhiloxWords w = weight_words(c, row + 2 * t + own % 2, key + g + own / 2 * 8);
  unsigned kept = 0;
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    const std::uint32_t word = __shfl_xor_sync(whole_warp, word_of(w, own ^ x), 4 * x);
    kept |= (word < c.threshold ? 0u : 1u) << (own ^ x);
  }
  return kept;
}

/// Rows r + g and + 8 of a C tile at column d, times a factor each, where they are below `count`.
template <class T>
__device__ void store_tile(std::uint16_t* to, std::int64_t stride, int r, int count, int d,
                           const float (&c)[4], float factor, float factor8) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size, row = r + lane / 4, column = d + lane % 4 * 2;
  if (row < count)
    *reinterpret_cast<std::uint32_t*>(to + row * stride + column) =
        pack_pair<T>(c[0] * factor, c[1] * factor);
  if (row + 8 < count)
    *reinterpret_cast<std::uint32_t*>(to + (row + 8) * stride + column) =
        pack_pair<T>(c[2] * factor8, c[3] * factor8);
}

/// Calls `f.operator()<T, Width>()`.
template <class F>
void for_mma_form(const AttentionCall& c, F&& f) {
  const auto typed = [&]<class T>() {
    switch (c.width) {
      case 32:
        return f.template operator()<T, 32>();
      case 64:
        return f.template operator()<T, 64>();
      case 96:
        return f.template operator()<T, 96>();
      default:
        return f.template operator()<T, 128>();
    }
  };
  c.dtype == DType::bf16 ? typed.template operator()<BFloat16>() : typed.template operator()<Half>();
}

}  // namespace sherd::cuda
