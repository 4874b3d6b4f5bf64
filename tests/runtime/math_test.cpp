#include "runtime/math.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "runtime/elementary.h"
#include "runtime/ops/pow.h"
#include "tests/catch.h"

using namespace sherd;

namespace {

/// Distance of `got` from the exact value, in units of the last place; 0 for equal values, infinities and
/// NaN.
template <class T>
double ulps(T got, long double want) {
  const T rounded = static_cast<T>(want);
  if (got == rounded || (std::isnan(got) && std::isnan(rounded))) return 0;
  if (!std::isfinite(got) || !std::isfinite(rounded)) return 1e9;
  const T size = std::max(std::fabs(rounded), std::numeric_limits<T>::min());
  const T unit = std::nextafter(size, std::numeric_limits<T>::infinity()) - size;
  return static_cast<double>(std::fabs(static_cast<long double>(got) - want) / unit);
}

/// Values of every size and sign, and all the special ones.
template <class T>
std::vector<T> arguments() {
  using L = std::numeric_limits<T>;
  std::vector<T> x = {0,
                      -T(0),
                      1,
                      -1,
                      L::infinity(),
                      -L::infinity(),
                      L::quiet_NaN(),
                      L::max(),
                      L::lowest(),
                      L::min(),
                      L::denorm_min(),
                      -L::denorm_min(),
                      L::epsilon(),
                      T(0.6),
                      T(88.8),
                      T(-88.8),
                      T(-103.5),
                      T(709.9),
                      T(-745.2)};
  for (int e = L::min_exponent; e < L::max_exponent; e += 3) {
    for (int i = 0; i < 50; ++i) x.push_back(std::ldexp(T(1) + i * T(0.0199), e) * (i % 2 ? 1 : -1));
  }
  for (int i = -60000; i <= 60000; ++i) x.push_back(i * T(0.00187));
  return x;
}

template <class T, class F, class G>
void check_function(const std::string& name, double limit, const F& got, const G& want) {
  double worst = 0;
  T at = 0;
  for (T x : arguments<T>()) {
    const double e = ulps(got(x), want(static_cast<long double>(x)));
    if (e > worst) worst = e, at = x;
  }
  INFO(name << " is " << worst << " ulp off at " << at);
  CHECK(worst <= limit);
}

/// `f` of each argument in a loop, and alone.
template <class T, class F>
void check_alone(const F& f) {
  const std::vector<T> x = arguments<T>();
  std::vector<T> y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = f(x[i]);
  for (std::size_t i = 0; i < x.size(); ++i) {
    volatile T alone = x[i];
    const T z = f(alone);
    const bool same = std::memcmp(&z, &y[i], sizeof(T)) == 0 || (std::isnan(z) && std::isnan(y[i]));
    REQUIRE(same);
  }
}

}  // namespace

TEMPLATE_TEST_CASE("elementary functions are right to a few units in the last place, everywhere",
                   "[one thread]", float, double) {
  using T = TestType;
  check_function<T>("exp", 1.1, [](T x) { return math::exp(x); }, [](long double x) { return std::exp(x); });
  check_function<T>("log", 1.1, [](T x) { return math::log(x); }, [](long double x) { return std::log(x); });
  check_function<T>(
      "log1p", sizeof(T) == 4 ? 0.9 : 3, [](T x) { return math::log1p(x); }, [](long double x) { return std::log1p(x); });
  check_function<T>("tanh", 2, [](T x) { return math::tanh(x); }, [](long double x) { return std::tanh(x); });
  check_function<T>(
      "erf", sizeof(T) == 4 ? 2 : 5, [](T x) { return math::erf(x); },
      [](long double x) { return std::erf(x); });
  check_function<T>(
      "rsqrt", 1.6, [](T x) { return math::rsqrt(x); }, [](long double x) { return 1 / std::sqrt(x); });
  // Below the smallest normal number e^-x overflows before the result does.
  check_function<T>(
      "sigmoid", 2.5, [](T x) { return math::sigmoid(std::max(x, T(sizeof(T) == 4 ? -87 : -708))); },
      [](long double x) { return 1 / (1 + std::exp(-std::max(x, sizeof(T) == 4 ? -87.L : -708.L))); });
}

TEMPLATE_TEST_CASE("powers that pow multiplies out are right to two units in the last place, everywhere",
                   "[one thread]", float, double) {
  using T = TestType;
  int powers = 0;
  for (const double power : {3.0, 0.5, -0.5, -1.0, -2.0})
    powers += ops::Pow::for_number(power, [&](const auto& f) {
      INFO("to the power " << power);
      check_function<T>("pow", sizeof(T) == 4 ? 1 : 2, f, [&](long double x) { return std::pow(x, power); });
      for (const T x : {T(0), -T(0), std::numeric_limits<T>::infinity(), -std::numeric_limits<T>::infinity()})
        CHECK(std::signbit(f(x)) == std::signbit(std::pow(x, static_cast<T>(power))));
      for (const T x : {T(0.3), T(1.7), T(40)})
        CHECK(std::fabs(f.grad_a(T(2), x, x) - 2 * power * std::pow(double(x), power - 1)) <=
              4 * std::numeric_limits<T>::epsilon() * std::fabs(2 * power * std::pow(double(x), power - 1)));
    });
  CHECK(powers == 5);
  for (const double power : {0.0, 1.0, 2.0, 2.5, -3.0}) {
    INFO("to the power " << power);
    CHECK_FALSE(ops::Pow::for_number(power, [](const auto&) {}));
  }
}

TEMPLATE_TEST_CASE(
    "angles, hyperbolas, powers and logarithms to a base are right to a unit in the last place, everywhere",
    "[one thread]", float, double) {
  using T = TestType;
  const auto check = [](const std::string& name, double limit, const auto& got, const auto& want) {
    check_function<T>(name, limit, got, want);
    for (const T x : {T(0), -T(0), T(1), T(-1), T(HUGE_VAL), T(-HUGE_VAL)}) {
      INFO(name << " at " << x);
      if (!std::isnan(got(x))) CHECK(std::signbit(got(x)) == std::signbit(want(x)));
    }
  };
#define SHERD_CHECK(f, limit) \
  check(#f, limit, [](T x) { return math::f(x); }, [](long double x) { return std::f(x); })
  constexpr bool single = sizeof(T) == 4;
  SHERD_CHECK(sin, 0.8);
  SHERD_CHECK(cos, 0.8);
  SHERD_CHECK(tan, single ? 1.25 : 1.1);
  SHERD_CHECK(exp2, 0.8);
  SHERD_CHECK(log2, single ? 0.85 : 0.51);
  SHERD_CHECK(log10, single ? 0.85 : 0.51);
  SHERD_CHECK(asin, single ? 0.65 : 2);
  SHERD_CHECK(acos, single ? 0.65 : 2);
  SHERD_CHECK(atan, single ? 1.15 : 1);
  SHERD_CHECK(sinh, 1);
  SHERD_CHECK(cosh, 1);
  SHERD_CHECK(asinh, 1.1);
  SHERD_CHECK(acosh, 1.6);
  SHERD_CHECK(atanh, single ? 1.1 : 0.55);
  SHERD_CHECK(expm1, single ? 2 : 3);
#undef SHERD_CHECK
  for (const T power :
       {T(-700.25), T(-3), T(-0.75), T(-1e-3), T(0), T(0.1), T(1), T(2), T(2.5), T(3), T(41), T(1e4)})
    check(
        "pow", single ? 0.51 : 1, [&](T x) { return math::pow(x, power); },
        [&](long double x) { return std::pow(x, static_cast<long double>(power)); });
}

TEMPLATE_TEST_CASE("powers and logarithms are exact where the result is a number", "[one thread]", float,
                   double) {
  using T = TestType;
  using L = std::numeric_limits<T>;
  const T exact = std::ldexp(T(1), L::digits);
  for (int base = 1; base < 300; ++base) {
    T product = 1;
    for (int n = 0; product < exact; ++n, product *= base == 1 ? T(0x1p20) : static_cast<T>(base)) {
      INFO(base << " to the power " << n);
      if (base > 1) CHECK(math::pow(T(base), T(n)) == product);
      if (base == 10) CHECK(math::log10(product) == n);
    }
  }
  for (int n = L::min_exponent - L::digits; n < L::max_exponent; ++n) {
    INFO("2 to the power " << n);
    CHECK(math::log2(std::ldexp(T(1), n)) == n);
    CHECK(math::exp2(T(n)) == std::ldexp(T(1), n));
    CHECK(math::pow(T(2), T(n)) == std::ldexp(T(1), n));
  }
}

TEMPLATE_TEST_CASE("powers and angles have IEEE 754's values at the edges", "[one thread]", float, double) {
  using T = TestType;
  std::vector<T> values;
  for (const double v : std::vector<double>{
           0,      -0.,   1,      -1,         0.5,    -2.5,  3,     -3,       1e-310,    -1e-310,
           5e-324, 1e300, 0x1p53, 0x1p53 + 2, -1e300, 709.9, -1075, HUGE_VAL, -HUGE_VAL, std::nan("")})
    values.push_back(static_cast<T>(v));
  for (const T y : values)
    for (const T x : values) {
      INFO(x << ", " << y);
      const long double wide_x = x, wide_y = y;
      CHECK(ulps(math::pow(x, y), std::pow(wide_x, wide_y)) <= 1);
      CHECK(ulps(math::atan2(y, x), std::atan2(wide_y, wide_x)) <= 1);
      if (!std::isnan(std::pow(x, y))) CHECK(std::signbit(math::pow(x, y)) == std::signbit(std::pow(x, y)));
      if (!std::isnan(std::atan2(y, x)))
        CHECK(std::signbit(math::atan2(y, x)) == std::signbit(std::atan2(y, x)));
    }
}

TEST_CASE("angles and remainders of floats are the C library's, of every sign and size") {
  std::vector<float> values = {0,      -0.f,   1,     -1,        0.3f,       -2.5f,         7,
                               1e-30f, -1e30f, 3e38f, HUGE_VALF, -HUGE_VALF, std::nanf(""), -1e-42f};
  for (const float y : values)
    for (const float x : values) {
      INFO(y << ", " << x);
      const float angle = math::atan2(y, x);
      CHECK(ulps(angle, std::atan2(static_cast<long double>(y), static_cast<long double>(x))) <= 0.9);
      if (!std::isnan(angle)) CHECK(std::signbit(angle) == std::signbit(std::atan2(y, x)));
      const float rest = math::remainder(y, x), cut = std::fmod(y, x);
      CHECK((rest == cut || rest == cut + x || (std::isnan(rest) && std::isnan(cut))));
      if (rest != 0 && !std::isnan(rest)) CHECK(std::signbit(rest) == std::signbit(x));
    }
  for (const int a : {-2147483647 - 1, -7, -1, 0, 1, 7, 2147483647})
    for (const int b : {-2147483647 - 1, -3, -1, 0, 1, 3, 2147483647}) {
      const std::int64_t x = a, y = b, rest = y == 0 ? 0 : (x % y + y) % y;
      CHECK(math::remainder(a, b) == rest);
      CHECK(math::remainder(x, y) == rest);
    }
}

TEMPLATE_TEST_CASE("a loop that vectorises gives the bits of single calls", "[one thread]", float, double) {
  using T = TestType;
  const auto compare = [](const auto& f) { check_alone<T>(f); };
  compare([](T v) { return math::exp(v); });
  compare([](T v) { return math::log(v); });
  compare([](T v) { return math::tanh(v); });
  compare([](T v) { return math::erf(v); });
  compare([](T v) { return math::expm1(v); });
  compare([](T v) { return math::tan(v); });
  compare([](T v) { return math::acos(v); });
  compare([](T v) { return math::asinh(v); });
  compare([](T v) { return math::pow(v, T(1.3)); });
}

TEST_CASE("sine and cosine of turns lie on the circle") {
  double worst = 0;
  for (int i = 0; i < (1 << 16); ++i) {
    const float turns = static_cast<float>(i) * 0x1p-16f;
    const math::SinCos got = math::sincos_turns(turns);
    worst = std::max({worst, std::abs(got.sin - std::sin(2 * M_PI * turns)),
                      std::abs(got.cos - std::cos(2 * M_PI * turns))});
  }
  CHECK(worst < 1.2e-7);
}
