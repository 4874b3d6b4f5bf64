// Counter-based random numbers: Philox 4x32-10 (Salmon et al., 2011). A number depends on the seed and its
// counter alone, so masks can be made again in backward, and every device and any number of threads see the
// same.
#pragma once

#include <cmath>
#include <cstdint>

#include "runtime/element.h"
#include "runtime/export.h"
#include "runtime/math.h"

namespace sherd {

/// The four 32-bit words that Philox makes of one counter.
struct PhiloxWords {
  std::uint32_t word[4];
  constexpr std::uint32_t operator[](int i) const { return word[i]; }
};

/// Philox 4x32-10 with the key `seed` and the counter (`counter`, `stream`), each low word first.
constexpr PhiloxWords philox(std::uint64_t seed, std::uint64_t counter, std::uint64_t stream = 0) {
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  std::uint32_t c0 = static_cast<std::uint32_t>(counter), c1 = static_cast<std::uint32_t>(counter >> 32);
  std::uint32_t c2 = static_cast<std::uint32_t>(stream), c3 = static_cast<std::uint32_t>(stream >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xd2511f53u} * c0, p1 = std::uint64_t{0xcd9e8d57u} * c2;
    c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

/// Uniform in [0, 1): the upper 24 bits of `word`, so every value is exact in float.
constexpr float uniform_from(std::uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

/// How to draw from [low, high): `base + u range` in f32, and no less than `first` and no more than `last`,
/// the outermost numbers of the dtype in there. Rounding may leave the interval at both ends.
struct UniformRange {
  float base, range, first, last;
  constexpr float operator()(float u) const {
    const float x = std::fma(u, range, base), below = math::where(x > last, last, x);
    return math::where(below < first, first, below);
  }
};
/// Where the dtype has no number in [low, high), every draw is `low`. Throws ValueError where low > high, or
/// where f32 or the dtype cannot hold the ends and their distance.
SHERD_API UniformRange uniform_range(DType dtype, double low, double high);

/// Words below this are dropped: drops with probability `p` in [0, 1], p = 1 drops all but one word of 2^32.
constexpr std::uint32_t drop_threshold(double p) {
  const double scaled = p * 0x1p32;
  return scaled >= 4294967295.0 ? 4294967295u : static_cast<std::uint32_t>(scaled);
}

struct NormalPair {
  float first, second;
};
/// Two independent standard normals (Box-Muller) of two words.
template <class Word = std::uint32_t>
constexpr NormalPair normal_from(Word a, Word b) {
  // 1 - u lies in (0, 1], so the logarithm is finite.
  const float radius = math::sqrt(-2.f * math::log(1.f - uniform_from(a)));
  const math::SinCos angle = math::sincos_turns(uniform_from(b));
  return {radius * angle.cos, radius * angle.sin};
}

/// An integer in [0, n), n <= 2^32, from one word (multiply-shift; the bias is below n / 2^32).
constexpr std::uint32_t below_from(std::uint32_t word, std::uint64_t n) {
  return static_cast<std::uint32_t>((std::uint64_t{word} * n) >> 32);
}

}  // namespace sherd
