#include "runtime/cpu/gemm.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "runtime/context.h"
#include "runtime/cpu/gemm_repeated.h"
#include "runtime/dtype.h"
#include "tests/catch.h"

using namespace sherd;

namespace {

template <class T>
std::vector<T> numbers(std::int64_t count, int seed) {
  std::vector<T> v;
  for (std::int64_t i = 0; i < count; ++i)
    v.push_back(T(compute_t<T>(((i * 7919 + seed * 104729) % 513 - 256) / 256.0)));
  return v;
}

/// A product whose rows have room behind them, in every matrix.
template <class T>
struct Problem {
  cpu::Gemm<T> g;
  std::vector<T> a, b, c, bias;

  Problem(std::int64_t m, std::int64_t n, std::int64_t k, bool ta, bool tb, std::int64_t batch) {
    g.m = m, g.n = n, g.k = k, g.transpose_a = ta, g.transpose_b = tb, g.batch = batch;
    g.lda = (ta ? m : k) + 3, g.ldb = (tb ? k : n) + 1, g.ldc = n + 2;
    g.stride_a = g.lda * (ta ? k : m), g.stride_b = g.ldb * (tb ? n : k), g.stride_c = g.ldc * m;
    a = numbers<T>(g.stride_a * batch + 1, 1), b = numbers<T>(g.stride_b * batch + 1, 2);
    c = numbers<T>(g.stride_c * batch + 1, 3), bias = numbers<T>(n, 4);
    g.a = a.data(), g.b = b.data(), g.c = c.data();
  }
  template <class F>
  std::vector<T> run(int threads, const F& multiply) {
    std::vector<T> result = c;
    g.c = result.data();
    Context::current().set_threads(threads);
    multiply(g);
    return result;
  }
  std::vector<T> run(int threads) { return run(threads, cpu::gemm<T>); }
  /// The sums written out, without room. Numbers are widened before, since a sanitizer looks at every step
  /// here.
  std::vector<double> expected() const {
    const std::vector<double> left = widened(a), right = widened(b), given = widened(c),
                              added = widened(bias);
    std::vector<double> sums(static_cast<std::size_t>(g.batch * g.m * g.n));
    double* row = sums.data();
    for (std::int64_t batch = 0; batch < g.batch; ++batch)
      for (std::int64_t i = 0; i < g.m; ++i, row += g.n) {
        for (std::int64_t j = 0; j < g.n; ++j) {
          row[j] = g.bias ? added[j] : 0;
          if (g.accumulate) row[j] += given[batch * g.stride_c + i * g.ldc + j];
        }
        const std::int64_t step = g.transpose_b ? g.ldb : 1, down = g.transpose_b ? 1 : g.ldb;
        for (std::int64_t p = 0; p < g.k; ++p) {
          const double x = left[batch * g.stride_a + (g.transpose_a ? p * g.lda + i : i * g.lda + p)];
          const double* const y = right.data() + batch * g.stride_b + p * down;
          for (std::int64_t j = 0; j < g.n; ++j) row[j] += x * y[j * step];
        }
      }
    return sums;
  }

 private:
  static std::vector<double> widened(const std::vector<T>& values) {
    std::vector<double> wide(values.size());
    const T* const from = values.data();
    double* const to = wide.data();
    for (std::size_t i = 0; i < values.size(); ++i) to[i] = double(compute_t<T>(from[i]));
    return wide;
  }
};

template <class T>
double relative_precision() {
  return std::is_same_v<T, double>  ? 1e-14
         : std::is_same_v<T, float> ? 1e-5
         : std::is_same_v<T, Half>  ? 1e-3
                                    : 8e-3;
}

template <class T, class F = void (*)(const cpu::Gemm<T>&)>
void check_problem(Problem<T>& p, const F& multiply = cpu::gemm<T>) {
  const auto& g = p.g;
  const std::vector<T> one = p.run(1, multiply), two = p.run(2, multiply);
  CHECK((one.empty() || std::memcmp(one.data(), two.data(), one.size() * sizeof(T)) == 0));
  double worst = 0;
  std::vector<T> only_room = one;  // with what `c` had where results are
  const std::vector<double> sums = p.expected();
  const double* want = sums.data();
  for (std::int64_t batch = 0; batch < g.batch; ++batch)
    for (std::int64_t i = 0; i < g.m; ++i)
      for (std::int64_t j = 0; j < g.n; ++j, ++want) {
        const std::int64_t at = batch * g.stride_c + i * g.ldc + j;
        worst = std::max(worst, std::abs(double(compute_t<T>(one[at])) - *want) /
                                    (std::abs(*want) + 1 + std::sqrt(double(g.k))));
        only_room[at] = p.c[at];
      }
  const bool room_untouched = std::memcmp(only_room.data(), p.c.data(), one.size() * sizeof(T)) == 0;
  CHECK(room_untouched);
  CHECK(worst < relative_precision<T>());
}

}  // namespace

TEMPLATE_TEST_CASE("gemm equals the sums written out, with the same bits for any number of threads", "",
                   float, double, Half, BFloat16) {
  for (auto [m, n, k] : {std::array{2, 16, 64},
                         {2, 64, 16},
                         {16, 64, 2},
                         {1, 1, 1},
                         {1, 100, 300},
                         {37, 70, 33},
                         {70, 5, 90},
                         {129, 65, 100},
                         {300, 47, 70},
                         {520, 37, 90},
                         {64, 64, 64},
                         {5, 0, 3},
                         {0, 5, 3},
                         {5, 3, 0}}) {
    for (int form = 0; form < 16; ++form) {
      Problem<TestType> p(m, n, k, form & 1, form & 2, 1);
      p.g.accumulate = form & 4;
      if (form & 8) p.g.bias = p.bias.data();
      INFO(m << "x" << n << "x" << k << " form " << form);
      check_problem(p);
    }
  }
}

TEMPLATE_TEST_CASE("gemm takes batches, and one matrix for a whole batch", "[one thread]", float, BFloat16) {
  for (auto [m, n, k] : {std::array{3, 5, 7}, {80, 70, 60}}) {
    for (int form = 0; form < 4; ++form) {
      Problem<TestType> p(m, n, k, form & 1, form & 2, 5);
      INFO(m << "x" << n << "x" << k << " form " << form);
      check_problem(p);
      p.g.stride_b = 0;
      check_problem(p);
    }
  }
}

TEMPLATE_TEST_CASE("gemm takes batches of small matrices, the last of a tile's too", "[one thread]", float,
                   BFloat16) {
  for (auto [m, n, k] : {std::array{64, 64, 64}, {16, 40, 70}, {7, 3, 2}}) {
    for (int form = 0; form < 16; ++form) {
      Problem<TestType> p(m, n, k, form & 1, form & 2, 43);
      p.g.accumulate = form & 4;
      if (form & 8) p.g.bias = p.bias.data();
      INFO(m << "x" << n << "x" << k << " form " << form);
      check_problem(p);
    }
  }
}

TEMPLATE_TEST_CASE("products with one B are what each is alone", "", float, double, Half, BFloat16) {
  for (auto [m, n, k] : {std::array{1, 300, 200},
                         {9, 96, 24},
                         {33, 200, 70},
                         {63, 64, 128},
                         {70, 130, 40},
                         {0, 5, 3},
                         {5, 3, 0}}) {
    for (int form = 0; form < 4; ++form) {
      Problem<TestType> p(m, n, k, false, form & 1, 1);
      if (form & 2) p.g.bias = p.bias.data();
      INFO(m << "x" << n << "x" << k << " form " << form);
      check_problem(p, [](const cpu::Gemm<TestType>& g) {
        const cpu::RepeatedGemm<TestType> product(g);
        // The second is another one's.
        const std::vector<TestType> other(g.m * g.lda + 1, TestType(1.0F));
        std::vector<TestType> elsewhere(g.m * g.ldc + 1);
        product(other.data(), elsewhere.data());
        product(g.a, g.c);
      });
    }
  }
}

TEST_CASE("the rows of a product do not depend on how many rows there are beyond a tile") {
  Problem<float> all(200, 96, 128, false, true, 1);
  const std::vector<float> whole = all.run(2);
  all.g.m = 129;
  const std::vector<float> part = all.run(2);
  CHECK(std::memcmp(whole.data(), part.data(), sizeof(float) * 129 * all.g.ldc) == 0);
}

TEST_CASE("NaN and infinity pass through a product with zeros") {
  Problem<float> p(20, 20, 20, false, false, 1);
  p.a[0] = std::numeric_limits<float>::infinity();
  for (std::int64_t j = 0; j < p.g.n; ++j) p.b[j] = 0;
  CHECK(std::isnan(p.run(1)[0]));
}
