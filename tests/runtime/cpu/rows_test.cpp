#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "runtime/context.h"
#include "runtime/cpu/norm.h"
#include "runtime/cpu/random.h"
#include "runtime/cpu/rows.h"
#include "runtime/cpu/softmax.h"
#include "tests/catch.h"

using namespace sherd;

namespace {

constexpr std::int64_t rows = 301;
const auto widths = {1, 7, 16, 33, 65, 128, 257, 600};

template <class T>
std::vector<T> numbers(std::int64_t count, std::uint64_t seed) {
  std::vector<float> v(count);
  cpu::fill_normal({seed, 0}, 0.5, 2, v.data(), count);
  std::vector<T> out;
  for (float x : v) out.push_back(T(compute_t<T>(x)));
  return out;
}
template <class T>
double value(T x) {
  return double(compute_t<T>(x));
}

template <class T>
constexpr double tolerance = std::is_same_v<T, double>  ? 1e-12
                             : std::is_same_v<T, float> ? 3e-5
                             : std::is_same_v<T, Half>  ? 4e-3
                                                        : 3e-2;

template <class T>
double difference(const std::vector<T>& got, const std::vector<double>& want) {
  double worst = got.size() == want.size() ? 0 : 1e9;
  for (std::size_t i = 0; i < got.size() && worst < 1e9; ++i) {
    worst = std::isnan(value(got[i]))
                ? 1e9
                : std::max(worst, std::abs(value(got[i]) - want[i]) / (1 + std::abs(want[i])));
  }
  return worst;
}

/// Runs with one thread and with two, and wants the same bits.
template <class T, class F>
std::vector<T> run(std::int64_t count, const F& body) {
  std::vector<T> one(count), two(count);
  Context::current().set_threads(1);
  body(one.data());
  Context::current().set_threads(2);
  body(two.data());
  CHECK(std::memcmp(one.data(), two.data(), count * sizeof(T)) == 0);
  return two;
}

}  // namespace

TEMPLATE_TEST_CASE("layer_norm and its gradients equal the formulas", "[one thread]", float, double, Half,
                   BFloat16) {
  using T = TestType;
  using C = compute_t<T>;
  for (std::int64_t n : widths) {
    for (const auto& [affine, residual] :
         {std::pair(false, false), std::pair(true, false), std::pair(true, true)}) {
      INFO("width " << n << " affine " << affine << " residual " << residual);
      const auto x = numbers<T>(rows * n, 1), w = numbers<T>(n, 2), b = numbers<T>(n, 3),
                 gy = numbers<T>(rows * n, 4), more = numbers<T>(rows * n, 5);
      const double eps = 1e-2;
      std::vector<C> mean(rows), rstd(rows);
      const auto y = run<T>(rows * n, [&](T* out) {
        cpu::layer_norm<T>(x.data(), affine ? w.data() : nullptr, affine ? b.data() : nullptr, eps, rows, n,
                           out, mean.data(), rstd.data());
      });
      std::vector<T> gw(n), gb(n);
      const auto gx = run<T>(rows * n, [&](T* out) {
        cpu::layer_norm_backward<T>(gy.data(), x.data(), affine ? w.data() : nullptr, mean.data(),
                                    rstd.data(), residual ? more.data() : nullptr, rows, n, out, gw.data(),
                                    gb.data());
      });
      std::vector<double> want_y, want_gx, want_gw(n), want_gb(n);
      for (std::int64_t r = 0; r < rows; ++r) {
        double m = 0, v = 0, s1 = 0, s2 = 0;
        for (std::int64_t j = 0; j < n; ++j) m += value(x[r * n + j]) / n;
        for (std::int64_t j = 0; j < n; ++j) v += std::pow(value(x[r * n + j]) - m, 2) / n;
        const double s = 1 / std::sqrt(v + eps);
        const auto weight = [&](std::int64_t j) { return affine ? value(w[j]) : 1; };
        const auto normal = [&](std::int64_t j) { return (value(x[r * n + j]) - m) * s; };
        const auto grad = [&](std::int64_t j) { return value(gy[r * n + j]); };
        for (std::int64_t j = 0; j < n; ++j) {
          want_y.push_back(normal(j) * weight(j) + (affine ? value(b[j]) : 0));
          want_gw[j] += grad(j) * normal(j), want_gb[j] += grad(j);
          s1 += grad(j) * weight(j) / n, s2 += grad(j) * weight(j) * normal(j) / n;
        }
        for (std::int64_t j = 0; j < n; ++j)
          want_gx.push_back((grad(j) * weight(j) - s1 - normal(j) * s2) * s +
                            (residual ? value(more[r * n + j]) : 0));
      }
      CHECK(difference(y, want_y) < tolerance<T>);
      CHECK(difference(gx, want_gx) < 10 * tolerance<T>);
      CHECK(difference(gw, want_gw) < 10 * tolerance<T>);
      CHECK(difference(gb, want_gb) < 10 * tolerance<T>);
    }
  }
}

TEMPLATE_TEST_CASE("softmax, log_softmax and cross_entropy equal the formulas", "[one thread]", float, double,
                   Half, BFloat16) {
  using T = TestType;
  using C = compute_t<T>;
  constexpr std::int64_t ignore = -100;
  for (std::int64_t n : widths) {
    INFO("width " << n);
    const auto x = numbers<T>(rows * n, 1), g = numbers<T>(rows * n, 2);
    std::vector<std::int64_t> targets;
    for (std::int64_t r = 0; r < rows; ++r) targets.push_back(r % 5 == 3 ? ignore : r * 7 % n);
    const auto y = run<T>(rows * n, [&](T* out) { cpu::softmax(x.data(), rows, n, out); });
    const auto l = run<T>(rows * n, [&](T* out) { cpu::log_softmax(x.data(), rows, n, out); });
    const auto gy =
        run<T>(rows * n, [&](T* out) { cpu::softmax_backward(y.data(), g.data(), rows, n, out); });
    const auto gl =
        run<T>(rows * n, [&](T* out) { cpu::log_softmax_backward(l.data(), g.data(), rows, n, out); });
    std::vector<C> tops(rows), logs(rows), scales(rows, C(0.5));
    const auto loss = run<C>(rows, [&](C* out) {
      CHECK(cpu::cross_entropy(x.data(), targets.data(), ignore, rows, n, out, tops.data(), logs.data()) ==
            -1);
    });
    const auto ge = run<T>(rows * n, [&](T* out) {
      cpu::cross_entropy_backward<T>(x.data(), targets.data(), ignore, tops.data(), logs.data(), C(3),
                                     scales.data(), rows, n, out);
    });
    std::vector<double> wy, wl, wgy, wgl, wloss, wge;
    for (std::int64_t r = 0; r < rows; ++r) {
      double total = 0, along = 0, sum = 0;
      for (std::int64_t j = 0; j < n; ++j) total += std::exp(value(x[r * n + j]));
      for (std::int64_t j = 0; j < n; ++j) {
        wy.push_back(std::exp(value(x[r * n + j])) / total);
        wl.push_back(value(x[r * n + j]) - std::log(total));
        along += value(y[r * n + j]) * value(g[r * n + j]), sum += value(g[r * n + j]);
      }
      const bool ignored = targets[r] == ignore;
      wloss.push_back(ignored ? 0 : std::log(total) - value(x[r * n + targets[r]]));
      for (std::int64_t j = 0; j < n; ++j) {
        wgy.push_back(value(y[r * n + j]) * (value(g[r * n + j]) - along));
        wgl.push_back(value(g[r * n + j]) - std::exp(value(l[r * n + j])) * sum);
        wge.push_back(ignored ? 0 : 1.5 * (wy[r * n + j] - (j == targets[r])));
      }
    }
    CHECK(difference(y, wy) < tolerance<T>);
    CHECK(difference(l, wl) < tolerance<T>);
    CHECK(difference(gy, wgy) < tolerance<T>);
    CHECK(difference(gl, wgl) < 3 * tolerance<T>);
    CHECK(difference(loss, wloss) < tolerance<C>);
    CHECK(difference(ge, wge) < tolerance<T>);
  }
}

TEST_CASE("cross_entropy names the first row with a target that is no class") {
  const std::vector<float> x(12);
  std::vector<float> loss(3), tops(3), logs(3);
  for (auto [targets, bad] :
       {std::pair<std::vector<std::int64_t>, int>{{0, 3, -100}, -1}, {{0, 4, 9}, 1}, {{-1, 0, 0}, 0}}) {
    CHECK(cpu::cross_entropy(x.data(), targets.data(), -100, 3, 4, loss.data(), tops.data(), logs.data()) ==
          bad);
  }
}

TEST_CASE("softmax of rows with infinities and NaN is what IEEE arithmetic says") {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> x = {-inf, 0, 0, -inf, -inf, -inf, 1e30f, -1e30f, 0, std::nanf(""), 0, 0};
  std::vector<float> y(12);
  cpu::softmax(x.data(), 4, 3, y.data());
  CHECK((y[0] == 0 && y[1] == 0.5f && y[2] == 0.5f));
  CHECK((std::isnan(y[3]) && std::isnan(y[4]) && std::isnan(y[9]) && std::isnan(y[11])));
  CHECK((y[6] == 1 && y[7] == 0 && y[8] == 0));
}

TEST_CASE("rows: vectors of bf16 have the bits of its conversions, NaN and ties among them") {
  int wrong = 0;
  for (std::uint32_t high = 0; high < 0x10000; ++high)
    for (const std::uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float f = std::bit_cast<float>(high << 16 | low);
      const std::vector<float> same(16, f);
      BFloat16 narrow[16];
      cpu::store_as<float>(narrow, cpu::load(same.data()));
      const cpu::Vec<float> wide = cpu::load_as<float>(narrow);
      const float expected = static_cast<float>(BFloat16(f)), got = wide[3];
      wrong += narrow[7].bits != BFloat16(f).bits || std::memcmp(&got, &expected, sizeof got) != 0;
    }
  CHECK(wrong == 0);
}
