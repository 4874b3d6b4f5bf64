#include "runtime/cpu/random.h"

#include <algorithm>
#include <cstring>

#include "runtime/cpu/simd.h"
#include "runtime/dtype.h"
#include "runtime/instances.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

constexpr int block = 16;  // counters made side by side

using Wide = Vec<std::uint64_t>;  // a 32-bit word in every 64-bit lane, so that products have room
constexpr std::uint64_t low_word = 0xffffffffu;

/// Product of the lower halves of the lanes.
Wide multiply(Wide x, std::uint32_t factor) {
#if defined(__AVX512F__)
  return reinterpret_cast<Wide>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(x), _mm512_set1_epi64(factor)));
#else
  return (x & low_word) * factor;
#endif
}

/// Philox on the eight counters from `at.offset`: the words in order. The upper halves of the lanes are left
/// dirty until the end, because products do not read them.
template <std::uint32_t stream>
void philox_eight(RandomKey at, std::uint32_t* out) {
  const Wide counter = at.offset + Wide{0, 1, 2, 3, 4, 5, 6, 7};
  Wide c0 = counter, c1 = counter >> 32, c2 = Wide{} + stream, c3{};
  std::uint32_t k0 = static_cast<std::uint32_t>(at.seed), k1 = static_cast<std::uint32_t>(at.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Wide p0 = multiply(c0, 0xd2511f53u), p1 = multiply(c2, 0xcd9e8d57u);
    c0 = (p1 >> 32) ^ c1 ^ k0;
    c2 = (p0 >> 32) ^ c3 ^ k1;
    c1 = p1;
    c3 = p0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  const Wide first = (c0 & low_word) | (c1 << 32), second = (c2 & low_word) | (c3 << 32);
  const Wide words[2] = {__builtin_shufflevector(first, second, 0, 8, 1, 9, 2, 10, 3, 11),
                         __builtin_shufflevector(first, second, 4, 12, 5, 13, 6, 14, 7, 15)};
  std::memcpy(out, words, sizeof words);
}

template <std::uint32_t stream = 0>
void philox_block(RandomKey at, std::uint32_t (&out)[4 * block]) {
  for (int l = 0; l < block; l += 8) {
    philox_eight<stream>({at.seed, at.offset + static_cast<std::uint64_t>(l)}, out + 4 * l);
  }
}

/// Calls `body(first element, words, count)` for each 64 elements of [0, n), in parallel.
template <class F>
void for_words(RandomKey at, std::int64_t n, const F& body) {
  constexpr std::int64_t step = 4 * block;
  parallel_for(n, 1 << 14, [&](std::int64_t begin, std::int64_t end) {
    std::uint32_t words[step];
    for (std::int64_t i = begin; i < end; i += step) {
      philox_block({at.seed, at.offset + static_cast<std::uint64_t>(i / 4)}, words);
      body(i, words, std::min(step, end - i));
    }
  });
}

}  // namespace

void philox_words(RandomKey at, std::int64_t counters, std::uint32_t* out) {
  std::uint32_t words[4 * block];
  for (std::int64_t i = 0; i < counters; i += block, at.offset += block) {
    philox_block(at, words);
    std::memcpy(out + 4 * i, words,
                static_cast<std::size_t>(std::min<std::int64_t>(block, counters - i)) * 16);
  }
}

void fill_uniform(RandomKey at, UniformRange range, float* out, std::int64_t n) {
  for_words(at, n, [&](std::int64_t i, const std::uint32_t* words, std::int64_t count) {
    for (std::int64_t j = 0; j < count; ++j) out[i + j] = range(uniform_from(words[j]));
  });
}

void fill_uniform(RandomKey at, UniformRangeOf<double> range, double* out, std::int64_t n) {
  for_words(at, n, [&](std::int64_t i, const std::uint32_t* words, std::int64_t count) {
    std::uint32_t more[4 * block];
    philox_block<stream_of_more>({at.seed, at.offset + static_cast<std::uint64_t>(i / 4)}, more);
    for (std::int64_t j = 0; j < count; ++j) out[i + j] = range(uniform_from(words[j], more[j]));
  });
}

void fill_normal(RandomKey at, double mean, double deviation, float* out, std::int64_t n) {
  const float m = static_cast<float>(mean), s = static_cast<float>(deviation);
  for_words(at, n, [&](std::int64_t i, const std::uint32_t* words, std::int64_t count) {
    float normals[4 * block];
    for (int j = 0; j < 2 * block; ++j) {
      const NormalPair pair = normal_from(words[2 * j], words[2 * j + 1]);
      normals[2 * j] = std::fma(pair.first, s, m);
      normals[2 * j + 1] = std::fma(pair.second, s, m);
    }
    std::copy_n(normals, count, out + i);
  });
}

void fill_integers(RandomKey at, std::int64_t low, std::int64_t high, std::int64_t* out, std::int64_t n) {
  const std::uint64_t range = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low);
  for_words(at, n, [&](std::int64_t i, const std::uint32_t* words, std::int64_t count) {
    for (std::int64_t j = 0; j < count; ++j)
      out[i + j] = low + static_cast<std::int64_t>(below_from(words[j], range));
  });
}

template <class T>
void dropout(RandomKey at, double p, const T* x, T* out, std::int64_t n) {
  using C = compute_t<T>;
  const std::uint32_t threshold = drop_threshold(p);
  const C scale = p < 1 ? static_cast<C>(1 / (1 - p)) : C(0);
  for_words(at, n, [&](std::int64_t i, const std::uint32_t* words, std::int64_t count) {
    for (std::int64_t j = 0; j < count; ++j) {
      const C kept = C(x[i + j]) * scale;
      out[i + j] = T(math::where(words[j] < threshold, C(0), kept));
    }
  });
}

[[gnu::used]] const auto random_instances =
    instances_for<floating_dtypes>([]<class T>() { return std::tuple(&dropout<T>); });

}  // namespace sherd::cpu
