#include "runtime/random.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "runtime/context.h"
#include "runtime/cpu/random.h"
#include "runtime/dtype.h"
#include "runtime/ops.h"
#include "tests/catch.h"

using namespace sherd;

namespace {

/// Runs with one thread and with two, and wants the same bits.
template <class T, class F>
std::vector<T> fill(std::int64_t n, const F& body) {
  std::vector<T> one(n), two(n);
  Context::current().set_threads(1);
  body(one.data());
  Context::current().set_threads(2);
  body(two.data());
  CHECK(std::memcmp(one.data(), two.data(), n * sizeof(T)) == 0);
  return two;
}

}  // namespace

TEST_CASE("philox gives the words of the published test vectors") {
  struct Vector {
    std::uint64_t seed, counter, stream;
    std::uint32_t want[4];
  };
  const std::uint64_t ones = ~std::uint64_t{0};
  for (const Vector& v : {Vector{0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
                          Vector{ones, ones, ones, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
                          Vector{0x299f31d0a4093822,
                                 0x85a308d3243f6a88,
                                 0x0370734413198a2e,
                                 {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}}) {
    for (int w = 0; w < 4; ++w) CHECK(philox(v.seed, v.counter, v.stream)[w] == v.want[w]);
  }
}

TEST_CASE("element i of a fill depends on word i % 4 of counter i / 4 alone") {
  const RandomKey at{0x123456789abcdef0, 0xfffffffe};  // the low word of the counter overflows on the way
  for (std::int64_t n : {1, 3, 64, 65, 40001}) {
    const auto word = [&](std::int64_t i) { return philox(at.seed, at.offset + i / 4)[i % 4]; };
    const auto u =
        fill<float>(n, [&](float* out) { cpu::fill_uniform(at, uniform_range(DType::f32, 0, 1), out, n); });
    const auto k = fill<std::int64_t>(n, [&](std::int64_t* out) { cpu::fill_integers(at, -3, 7, out, n); });
    const auto z = fill<float>(n, [&](float* out) { cpu::fill_normal(at, 0, 1, out, n); });
    const std::vector<float> x(n, 1.5f);
    const auto d = fill<float>(n, [&](float* out) { cpu::dropout(at, 0.25, x.data(), out, n); });
    std::vector<std::uint32_t> words((n + 3) / 4 * 4);
    cpu::philox_words(at, (n + 3) / 4, words.data());
    bool right = true;
    for (std::int64_t i = 0; i < n; ++i) {
      right &= words[i] == word(i) && u[i] == uniform_from(word(i)) &&
               k[i] == -3 + std::int64_t{below_from(word(i), 10)};
      right &= d[i] == (word(i) < drop_threshold(0.25) ? 0.f : 2.f);
      const NormalPair pair = normal_from(word(i / 2 * 2), word(i / 2 * 2 + 1));
      right &= z[i] == (i % 2 ? pair.second : pair.first);
    }
    CHECK(right);
  }
}

TEST_CASE("uniform draws of f64 have 53 bits, and their upper 24 are the draws of f32") {
  const RandomKey at{0x123456789abcdef0, 0xfffffffe};
  for (std::int64_t n : {1, 3, 64, 65, 40001}) {
    const auto u =
        fill<double>(n, [&](double* out) { cpu::fill_uniform(at, uniform_range_f64(0, 1), out, n); });
    const auto f =
        fill<float>(n, [&](float* out) { cpu::fill_uniform(at, uniform_range(DType::f32, 0, 1), out, n); });
    bool right = true;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::uint32_t word = philox(at.seed, at.offset + i / 4)[i % 4],
                          more = philox(at.seed, at.offset + i / 4, stream_of_more)[i % 4];
      right &= u[i] == uniform_from(word, more) && u[i] >= 0 && u[i] < 1;
      right &= std::floor(u[i] * 0x1p24) * 0x1p-24 == f[i];
    }
    CHECK(right);
  }
  CHECK(uniform_from(~0u, ~0u) == 1 - 0x1p-53);
  // Each bit is set in half of them.
  const std::int64_t n = 1 << 16;
  std::int64_t set[53] = {};
  for (const double u : rand({n}, {f64}).to_vector<double>()) {
    const double whole = u * 0x1p53;
    REQUIRE(std::floor(whole) == whole);
    const auto bits = static_cast<std::uint64_t>(whole);
    for (int b = 0; b < 53; ++b) set[b] += bits >> b & 1;
  }
  for (const std::int64_t count : set) CHECK(std::abs(double(count) / n - 0.5) < 0.015);
}

TEST_CASE("fills have the moments and the range that they should", "[one thread]") {
  const std::int64_t n = 1 << 20;
  std::vector<float> x(n);
  const auto moments = [&] {
    double mean = 0, square = 0;
    for (float v : x) mean += v, square += double(v) * v;
    return std::pair{mean / n, square / n - mean / n * (mean / n)};
  };
  cpu::fill_uniform({1, 0}, uniform_range(DType::f32, -2, 4), x.data(), n);
  CHECK(moments().first == Approx(1).margin(0.01));
  CHECK(moments().second == Approx(3).epsilon(0.01));
  for (float v : x) REQUIRE((v >= -2 && v < 4));
  cpu::fill_uniform({1, 0}, uniform_range(DType::f32, 1, std::nextafter(1.f, 2.f)), x.data(), n);
  for (float v : x) REQUIRE(v == 1);
  cpu::fill_normal({2, 0}, 5, 3, x.data(), n);
  CHECK(moments().first == Approx(5).margin(0.02));
  CHECK(moments().second == Approx(9).epsilon(0.01));
  const std::vector<float> ones(n, 1.f);
  cpu::dropout({3, 0}, 0.2, ones.data(), x.data(), n);
  CHECK(moments().first == Approx(1).margin(0.01));
  cpu::dropout({3, 0}, 1, ones.data(), x.data(), n);
  CHECK(moments().second == 0);
  cpu::dropout({3, 0}, 0, ones.data(), x.data(), n);
  CHECK(x == ones);
}

TEMPLATE_TEST_CASE("dropout drops the same elements of every dtype", "", double, Half, BFloat16) {
  using T = TestType;
  const std::vector<float> plain(1000, 1.f);
  const std::vector<T> x(1000, T(compute_t<T>(1)));
  std::vector<float> want(1000);
  std::vector<T> got(1000);
  cpu::dropout({9, 4}, 0.5, plain.data(), want.data(), 1000);
  cpu::dropout({9, 4}, 0.5, x.data(), got.data(), 1000);
  for (int i = 0; i < 1000; ++i) REQUIRE(compute_t<T>(got[i]) == want[i]);
}

TEST_CASE("uniform draws stay in the half-open range, in every dtype and for any ends") {
  const std::pair<double, double> ranges[] = {{0, 1},
                                              {-1, 0},
                                              {-1, 1},
                                              {0.3, 0.7},
                                              {0.7, 0.70001},
                                              {1, 1.01},
                                              {1000, 1001},
                                              {-1e-3, 1e-12},
                                              {1e-30, 1e-6},
                                              {-6e4, 6e4},
                                              {5, 5},
                                              {0, 5e-324},
                                              {-3, -2.999},
                                              {2047, 2049},
                                              {0.1f, 0.1f + 1e-7},
                                              {-1e-9, 0},
                                              {16777216, 16777220},
                                              {-2.5, 65504}};
  for (DType dtype : {f64, f32, f16, bf16}) {
    for (const auto& [low, high] : ranges) {
      const double largest = dtype == f16 ? 65504 : 3e38;
      if (std::abs(high) > largest || std::abs(low) > largest) {
        CHECK_THROWS_AS(rand({4}, {dtype}, low, high), ValueError);
        continue;
      }
      const std::vector<double> drawn = to(rand({100000}, {dtype}, low, high), f64).to_vector<double>();
      const auto [least, most] = std::minmax_element(drawn.begin(), drawn.end());
      INFO(name_of(dtype) << " [" << low << ", " << high << "): " << *least << " to " << *most);
      if (*least == *most) {  // perhaps the dtype has no number in there: then it is as near as can be
        CHECK(*least == to(Tensor::scalar(low, {dtype}), f64).item());
      } else {
        CHECK(*least >= low);
        CHECK(*most < high);
      }
    }
  }
  for (double end : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN(), 1e39})
    for (DType dtype : {f64, f32, f16, bf16}) {
      if (dtype == f64 && end == 1e39) continue;  // it holds that
      CHECK_THROWS_AS(rand({4}, {dtype}, 0, end), ValueError);
      CHECK_THROWS_AS(rand({4}, {dtype}, -end, 0), ValueError);
    }
  CHECK_THROWS_AS(rand({4}, {f32}, -3e38, 3e38), ValueError);
}

TEST_CASE("randint takes ranges of at most 2^32 integers anywhere") {
  constexpr std::int64_t least = INT64_MIN, most = INT64_MAX, word = std::int64_t{1} << 32;
  for (const auto& [low, high] :
       {std::pair{least, least + word}, {most - word, most}, {-word / 2, word / 2}, {least, least + 1}}) {
    for (std::int64_t x : randint(low, high, {1000}, {i64}).to_vector<std::int64_t>())
      REQUIRE((x >= low && x < high));
  }
  for (const auto& [low, high] : {std::pair{least, most},
                                  {least, std::int64_t{0}},
                                  {std::int64_t{-1}, most},
                                  {std::int64_t{0}, word + 1},
                                  {most, least},
                                  {std::int64_t{3}, std::int64_t{3}}})
    CHECK_THROWS_AS(randint(low, high, {3}, {i64}), ValueError);
}
