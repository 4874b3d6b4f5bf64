#include "runtime/cpu/optim.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "runtime/context.h"
#include "runtime/cpu/random.h"
#include "runtime/exact_squares.h"
#include "tests/catch.h"

using namespace sherd;

namespace {

std::vector<float> numbers(std::int64_t count, std::uint64_t seed) {
  std::vector<float> v(count);
  cpu::fill_normal({seed, 0}, 0, 1, v.data(), count);
  return v;
}

struct Parameter {
  std::vector<float> p, g, m, v;
  explicit Parameter(std::int64_t n, std::uint64_t seed = 1)
      : p(numbers(n, seed)), g(numbers(n, seed + 1)), m(n), v(n) {}
  cpu::AdamSlot slot(double step) {
    return {p.data(), g.data(), m.data(), v.data(), static_cast<std::int64_t>(p.size()), step};
  }
};

template <class T>
double norm(std::span<const cpu::Values<T>> list) {
  std::vector<std::int64_t> limbs(ExactSquares::limbs);
  cpu::add_squares(list, limbs.data());
  return root_of(limbs.data());
}

}  // namespace

TEST_CASE("ten steps of Adam and AdamW follow the formulas") {
  for (bool decoupled : {false, true}) {
    for (double decay : {0.0, 0.1}) {
      Parameter x(1000);
      std::vector<double> p(x.p.begin(), x.p.end()), m(1000), v(1000);
      const cpu::AdamCall o{.lr = 1e-2,
                            .beta1 = 0.9,
                            .beta2 = 0.95,
                            .eps = 1e-8,
                            .weight_decay = decay,
                            .decoupled = decoupled};
      for (int step = 1; step <= 10; ++step) {
        const cpu::AdamSlot slots[] = {x.slot(step)};
        cpu::adam(slots, o);
        for (int i = 0; i < 1000; ++i) {
          double g = x.g[i];
          if (decoupled)
            p[i] *= 1 - o.lr * decay;
          else
            g += decay * p[i];
          m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
          v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
          p[i] -= o.lr / (1 - std::pow(o.beta1, step)) * m[i] /
                  (std::sqrt(v[i] / (1 - std::pow(o.beta2, step))) + o.eps);
        }
      }
      double worst = 0;
      for (int i = 0; i < 1000; ++i) worst = std::max(worst, std::abs(x.p[i] - p[i]));
      INFO("decoupled " << decoupled << " decay " << decay);
      CHECK(worst < 4e-6);
    }
  }
}

TEST_CASE("a step has the same bits however the elements are split over tensors and threads") {
  const std::int64_t n = 70001;
  Parameter whole(n), parts(n);
  const cpu::AdamCall o{.weight_decay = 0.01, .decoupled = true};
  Context::current().set_threads(1);
  const cpu::AdamSlot one[] = {whole.slot(3)};
  cpu::adam(one, o);
  Context::current().set_threads(2);
  std::vector<cpu::AdamSlot> slots;
  std::int64_t at = 0;
  for (std::int64_t size : {0, 1, 13, 0, 40000, 20, 29967, 0}) {
    slots.push_back(
        {parts.p.data() + at, parts.g.data() + at, parts.m.data() + at, parts.v.data() + at, size, 3});
    at += size;
  }
  REQUIRE(at == n);
  cpu::adam(slots, o);
  CHECK((parts.p == whole.p && parts.m == whole.m && parts.v == whole.v));
  cpu::adam({}, o);
}

TEST_CASE("SGD with and without momentum follows the formulas") {
  for (double momentum : {0.0, 0.9}) {
    Parameter x(300);
    std::vector<double> p(x.p.begin(), x.p.end()), buffer(300);
    for (int step = 0; step < 5; ++step) {
      const cpu::SgdSlot slots[] = {
          {x.p.data(), x.g.data(), momentum > 0 ? x.m.data() : nullptr, 300, step == 0}};
      cpu::sgd(slots, {.lr = 0.1, .momentum = momentum, .weight_decay = 0.01});
      for (int i = 0; i < 300; ++i) {
        const double g = x.g[i] + 0.01 * p[i];
        buffer[i] = momentum * buffer[i] + g;
        p[i] -= 0.1 * (momentum > 0 ? buffer[i] : g);
      }
    }
    double worst = 0;
    for (int i = 0; i < 300; ++i) worst = std::max(worst, std::abs(x.p[i] - p[i]));
    CHECK(worst < 1e-5);
  }
}

TEMPLATE_TEST_CASE("the norm is right, and the same bits in any order and any split", "", float, double, Half,
                   BFloat16) {
  using T = TestType;
  using C = compute_t<T>;
  for (double size : {1.0, std::is_same_v<T, Half> ? 100.0 : 1e18, std::is_same_v<T, Half> ? 1e-3 : 1e-25}) {
    std::vector<T> x;
    for (float f : numbers(50000, 5)) x.push_back(T(C(f * size)));
    double square = 0;
    for (T v : x) square += double(C(v)) * double(C(v));
    const cpu::Values<T> one[] = {{x.data(), 50000}};
    Context::current().set_threads(1);
    const double first = norm<T>(one);
    CHECK(first == Approx(std::sqrt(square)).epsilon(1e-7));
    std::reverse(x.begin(), x.end());
    std::rotate(x.begin(), x.begin() + 12345, x.end());
    Context::current().set_threads(2);
    const cpu::Values<T> parts[] = {
        {x.data(), 7}, {x.data(), 0}, {x.data() + 7, 30000}, {x.data() + 30007, 19993}};
    CHECK(norm<T>(parts) == first);
  }
}

TEST_CASE("the norm of nothing, of zeros, of infinities and of NaN") {
  std::vector<float> x(40000);
  const cpu::Values<float> list[] = {{x.data(), 40000}};
  CHECK(norm<float>({}) == 0);
  CHECK(norm<float>(list) == 0);
  x[20000] = -std::numeric_limits<float>::infinity();
  CHECK(norm<float>(list) == std::numeric_limits<double>::infinity());
  x[3] = std::numeric_limits<float>::quiet_NaN();
  CHECK(std::isnan(norm<float>(list)));
  x.assign(40000, std::numeric_limits<float>::denorm_min());
  CHECK(norm<float>(list) == Approx(200 * double(std::numeric_limits<float>::denorm_min())));
}

TEST_CASE("scale multiplies every value of a list") {
  std::vector<float> a = numbers(20000, 1), b = numbers(5, 2);
  const std::vector<float> before = a;
  const cpu::MutableValues<float> list[] = {{a.data(), 20000}, {b.data(), 5}};
  cpu::scale<float>(list, 0.5);
  for (std::size_t i = 0; i < a.size(); ++i) REQUIRE(a[i] == before[i] * 0.5f);
}
