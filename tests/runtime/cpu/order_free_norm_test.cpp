#include "runtime/cpu/order_free_norm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
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

template <class T>
double norm(std::span<const std::span<const T>> list) {
  std::vector<std::int64_t> limbs(ExactSquares::limbs);
  cpu::add_squares(list, limbs.data());
  return root_of(limbs.data());
}

}  // namespace

TEMPLATE_TEST_CASE("the norm is right, and the same bits in any order and any split", "", float, double, Half,
                   BFloat16) {
  using T = TestType;
  using C = compute_t<T>;
  for (double size : {1.0, std::is_same_v<T, Half> ? 100.0 : 1e18, std::is_same_v<T, Half> ? 1e-3 : 1e-25}) {
    std::vector<T> x;
    for (float f : numbers(50000, 5)) x.push_back(T(C(f * size)));
    double square = 0;
    for (T v : x) square += double(C(v)) * double(C(v));
    const std::span<const T> one[] = {{x.data(), 50000}};
    Context::current().set_threads(1);
    const double first = norm<T>(one);
    CHECK(first == Approx(std::sqrt(square)).epsilon(1e-7));
    std::reverse(x.begin(), x.end());
    std::rotate(x.begin(), x.begin() + 12345, x.end());
    Context::current().set_threads(2);
    const std::span<const T> parts[] = {
        {x.data(), 7}, {x.data(), 0}, {x.data() + 7, 30000}, {x.data() + 30007, 19993}};
    CHECK(norm<T>(parts) == first);
  }
}

TEST_CASE("the norm of nothing, of zeros, of infinities and of NaN") {
  std::vector<float> x(40000);
  const std::span<const float> list[] = {{x.data(), 40000}};
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
  const std::span<float> list[] = {{a.data(), 20000}, {b.data(), 5}};
  cpu::scale<float>(list, 0.5);
  for (std::size_t i = 0; i < a.size(); ++i) REQUIRE(a[i] == before[i] * 0.5f);
}
