// Lanes have the bits of single numbers, and the loops of elementwise ops are made of them.
#include "runtime/cpu/lanes.h"

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "runtime/cpu/elementwise_loop.h"
#include "runtime/cpu/simd.h"
#include "runtime/elementary.h"
#include "runtime/ops/elementwise_list.h"
#include "tests/catch.h"

using namespace sherd;

namespace {

/// Numbers of every size and sign, and all the special ones, in whole lanes.
template <class T>
std::vector<T> numbers(unsigned seed) {
  using L = std::numeric_limits<T>;
  std::vector<T> x = {0,         -T(0),       1,        -1,           L::infinity(),  -L::infinity(),
                      L::max(),  L::lowest(), L::min(), L::epsilon(), L::quiet_NaN(), L::denorm_min(),
                      -L::min(), T(0.5),      T(-0.5),  T(0x1p17)};
  std::mt19937_64 draw(seed);
  for (int i = 0; i < 4096; ++i) {
    const std::uint64_t bits = draw();
    T any;
    std::memcpy(&any, &bits, sizeof any);
    x.push_back(i % 2 == 0 ? any : static_cast<T>(static_cast<double>(bits >> 11) * 0x1p-53 * 20 - 10));
  }
  return x;
}

template <class T>
bool same_bits(T a, T b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b);
}

/// `f` of lanes is `f` of each of them; `f` is generic in its number.
template <class T, class F>
void check_lanes(const std::string& name, const F& f) {
  using Many = cpu::Lanes<T>;
  constexpr std::size_t count = sizeof(Many) / sizeof(T);
  const std::vector<T> a = numbers<T>(1), b = numbers<T>(2);
  for (std::size_t i = 0; i + count <= a.size(); i += count) {
    const Many got = f(Many(cpu::load(a.data() + i)), Many(cpu::load(b.data() + i)));
    T lane[count];
    cpu::store(lane, got.vector());
    for (std::size_t l = 0; l < count; ++l) {
      const T want = f(a[i + l], b[i + l]);
      INFO(name << " of " << a[i + l] << " and " << b[i + l] << " is " << want << ", in lanes " << lane[l]);
      REQUIRE(same_bits(lane[l], want));
    }
  }
}

template <class O>
concept OfFloats = !sherd::detail::gives_bool<O>() && O::dtypes.contains(DType::f32) && O::arity <= 2;

/// That the loops of `O` and of its gradients are made of lanes, which have the bits of the functor's
/// numbers.
template <class T, OfFloats O>
void check_op(const O& op) {
  const auto check = [](const std::string& name, const auto& f) {
    using F = std::decay_t<decltype(f)>;
    const auto takes = []<std::size_t... k>(std::index_sequence<k...>) {
      return sherd::detail::takes_lanes<F, T, decltype(T(k))...>();
    };
    INFO(name << ": its loop is not made of vectors");
    CHECK(takes(std::make_index_sequence<F::arity>{}) == cpu::has_vectors);
    if constexpr (F::arity == 1)
      check_lanes<T>(name, [&](auto a, auto) { return f(a); });
    else if constexpr (F::arity == 2)
      check_lanes<T>(name, [&](auto a, auto b) { return f(a, b); });
    else if constexpr (F::arity == 3)
      check_lanes<T>(name, [&](auto a, auto b) { return f(a, b, a); });
    else
      check_lanes<T>(name, [&](auto a, auto b) { return f(a, b, a, b); });
  };
  check(std::string(O::name), op);
  if constexpr (sherd::detail::HasScalarGrad<O>)
    [&]<std::size_t... i>(std::index_sequence<i...>) {
      const auto gradient = [&]<int k>() {
        if constexpr (((sherd::detail::identity_grads<O>() >> k) & 1) == 0)
          check(std::string(O::name) + "'s gradient", ElementwiseGrad<O, k>{op});
      };
      (gradient.template operator()<static_cast<int>(i)>(), ...);
    }(std::make_index_sequence<O::arity>{});
}

}  // namespace

TEMPLATE_TEST_CASE("lanes: elementary functions have the bits of single numbers", "[one thread]", float,
                   double) {
  using T = TestType;
#define SHERD_CHECK(f) check_lanes<T>(#f, [](auto a, auto) { return math::f(a); })
  SHERD_CHECK(exp);
  SHERD_CHECK(log);
  SHERD_CHECK(log1p);
  SHERD_CHECK(expm1);
  SHERD_CHECK(exp2);
  SHERD_CHECK(log2);
  SHERD_CHECK(log10);
  SHERD_CHECK(sigmoid);
  SHERD_CHECK(tanh);
  SHERD_CHECK(erf);
  SHERD_CHECK(sin);
  SHERD_CHECK(cos);
  SHERD_CHECK(tan);
  SHERD_CHECK(asin);
  SHERD_CHECK(acos);
  SHERD_CHECK(atan);
  SHERD_CHECK(sinh);
  SHERD_CHECK(cosh);
  SHERD_CHECK(asinh);
  SHERD_CHECK(acosh);
  SHERD_CHECK(atanh);
  SHERD_CHECK(rsqrt);
  SHERD_CHECK(round);
#undef SHERD_CHECK
  check_lanes<T>("pow", [](auto a, auto b) { return math::pow(a, b); });
  check_lanes<T>("atan2", [](auto a, auto b) { return math::atan2(a, b); });
  check_lanes<T>("remainder", [](auto a, auto b) { return math::remainder(a, b); });
  check_lanes<T>("floor_divide", [](auto a, auto b) { return math::floor_divide(a, b); });
  check_lanes<T>("normal", [](auto a, auto) { return math::normal(a).cdf; });
}

TEMPLATE_TEST_CASE(
    "lanes: the loops of elementwise ops of floats are made of them, with the bits of single numbers",
    "[one thread]", float, double) {
  using T = TestType;
  int ops = 0;
  const auto check = [&]<class O>(const O& op) {
    if constexpr (OfFloats<O>) check_op<T>(op), ++ops;
  };
  ops::UnaryOps::for_each([&]<class O>() { check(O{}); });
  ops::ArithmeticOps::for_each([&]<class O>() { check(O{}); });
  ops::BoundRight::for_each([&]<class O>() { check(WithScalar<O>{.right = 1.7}); });
  ops::BoundLeft::for_each([&]<class O>() { check(ScalarWith<O>{.left = 1.7}); });
  CHECK(ops > 60);
}

namespace {

/// As an application writes it.
struct Written {
  template <class T>
  T operator()(T x, T y) const {
    using math::where;
    T total = x;
    total += y, total *= x, total -= T(1), total /= T(3);
    return where((x > T(0) && y > T(0)) || !(x != y), total, -total);
  }
};
/// One that asks its number.
struct Asking {
  static constexpr bool lanes = false;
  template <class T>
  T operator()(T x) const {
    return x > 0 ? x : 0;
  }
};
struct OfFloat {
  float operator()(float x) const { return x + 1; }
};

}  // namespace

TEST_CASE("lanes: functors of applications get them, unless they are of plain numbers or say no",
          "[one thread]") {
  check_lanes<float>("written", Written{});
  check_lanes<double>("written", Written{});
  CHECK(sherd::detail::takes_lanes<Written, float, float, float>() == cpu::has_vectors);
  CHECK(sherd::detail::takes_lanes<Written, BFloat16, BFloat16, BFloat16>() == cpu::has_vectors);
  CHECK_FALSE(sherd::detail::takes_lanes<Written, std::int64_t, std::int64_t, std::int64_t>());
  CHECK_FALSE(sherd::detail::takes_lanes<Written, float, double, float>());
  CHECK_FALSE(sherd::detail::takes_lanes<Asking, float, float>());
  CHECK_FALSE(sherd::detail::takes_lanes<OfFloat, float, float>());
}

TEST_CASE("lanes: 16-bit floats become f32 and back as one by one", "[one thread]") {
  const auto check = []<class T>(T) {
    for (std::uint32_t first = 0; first < 1u << 16; first += 16) {
      T halves[16], back[16];
      for (std::uint32_t l = 0; l < 16; ++l) halves[l] = T::from_bits(static_cast<std::uint16_t>(first + l));
      float wide[16];
      cpu::store(wide, cpu::load_as<float>(halves));
      cpu::store_as<float>(back, cpu::load(wide));
      for (int l = 0; l < 16; ++l) {
        REQUIRE(same_bits(wide[l], static_cast<float>(halves[l])));
        REQUIRE(back[l].bits == T(wide[l]).bits);
      }
    }
    for (const float x : numbers<float>(3)) {
      float same[16];
      std::fill_n(same, 16, x);
      T halves[16];
      cpu::store_as<float>(halves, cpu::load(same));
      REQUIRE(halves[15].bits == T(x).bits);
    }
  };
  check(Half{});
  check(BFloat16{});
}
