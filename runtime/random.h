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

/// The same with 53 bits for f64: below those of `word` come the upper 29 of `more`, so that an f64 draw is
/// the f32 one and further digits.
constexpr double uniform_from(std::uint32_t word, std::uint32_t more) {
  return static_cast<double>(std::uint64_t{word >> 8} << 29 | more >> 3) * 0x1p-53;
}

/// The Philox stream that has `more`, at the counter and place of `word`.
inline constexpr std::uint32_t stream_of_more = 1;

/// Four uniform numbers of 53 bits at one counter.
struct UniformNumbers {
  double number[4];
  constexpr double operator[](int i) const { return number[i]; }
};
constexpr UniformNumbers uniform_numbers(std::uint64_t seed, std::uint64_t counter) {
  const PhiloxWords words = philox(seed, counter), more = philox(seed, counter, stream_of_more);
  UniformNumbers four{};
  for (int i = 0; i < 4; ++i) four.number[i] = uniform_from(words[i], more[i]);
  return four;
}

/// Turns a uniform `u` in [0, 1) into a draw from [low, high) of a dtype: base + u range, computed in f32
/// (in f64 for f64), then limited to [first, last], the smallest and largest numbers of the dtype in the
/// interval, because rounding may leave it at both ends.
template <class C>
struct UniformRangeOf {
  C base, range, first, last;
  constexpr C operator()(C u) const {
    const C x = std::fma(u, range, base), below = math::where(x > last, last, x);
    return math::where(below < first, first, below);
  }
};
using UniformRange = UniformRangeOf<float>;
/// The range for `dtype`, which is not f64; where that has no number in [low, high), every draw is `low`.
/// ValueError for low > high, and where f32 or the dtype cannot hold both ends and their distance.
SHERD_API UniformRange uniform_range(DType dtype, double low, double high);
/// The same for f64.
SHERD_API UniformRangeOf<double> uniform_range_f64(double low, double high);

/// An element is dropped when its random word is below this: probability `p` in [0, 1], but p = 1 keeps one
/// word of 2^32.
constexpr std::uint32_t drop_threshold(double p) {
  const double scaled = p * 0x1p32;
  return scaled >= 4294967295.0 ? 4294967295u : static_cast<std::uint32_t>(scaled);
}

struct NormalPair {
  float first, second;
};
/// Two independent standard normals from two words (Box and Muller, 1958).
template <class Word = std::uint32_t>
constexpr NormalPair normal_from(Word a, Word b) {
  // 1 - u lies in (0, 1], so the logarithm is finite.
  const float radius = math::sqrt(-2.f * math::log(1.f - uniform_from(a)));
  const math::SinCos angle = math::sincos_turns(uniform_from(b));
  return {radius * angle.cos, radius * angle.sin};
}

/// An integer in [0, n), n <= 2^32, from one word (multiply-shift, Lemire, 2019, without rejection; the
/// relative bias is below n / 2^32).
constexpr std::uint32_t below_from(std::uint32_t word, std::uint64_t n) {
  return static_cast<std::uint32_t>((std::uint64_t{word} * n) >> 32);
}

}  // namespace sherd
