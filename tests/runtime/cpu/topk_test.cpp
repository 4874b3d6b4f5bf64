// The order of rows against the standard library's stable sort.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "runtime/cpu/row_order.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// Few values, so that many are equal, with all that compares in ways of its own among them.
template <class T>
std::vector<T> few_values(std::int64_t n, unsigned seed) {
  using C = compute_t<T>;
  std::vector<T> choice;
  if constexpr (std::is_floating_point_v<C>) {
    using L = std::numeric_limits<C>;
    for (const C x : {C(0), -C(0), C(1.5), C(-1.5), C(3e4), C(-3e4), C(1e-7), C(-1e-7), L::infinity(),
                      -L::infinity(), L::quiet_NaN(), -L::quiet_NaN()})
      choice.push_back(static_cast<T>(x));
  } else if constexpr (std::is_same_v<T, bool>) {
    choice = {false, true};
  } else {
    for (const T x : {std::numeric_limits<T>::min(), T(0), T(1), T(100), std::numeric_limits<T>::max()})
      choice.push_back(x);
  }
  std::mt19937 engine(seed);
  std::vector<T> list;
  for (std::int64_t i = 0; i < n; ++i) list.push_back(choice[engine() % choice.size()]);
  return list;
}

template <class T>
std::vector<T> any_values(std::int64_t n, unsigned seed) {
  std::mt19937_64 engine(seed);
  std::vector<T> list;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto word = engine();
    if constexpr (std::is_same_v<T, bool>)
      list.push_back(word % 2 == 1);
    else
      list.push_back(std::bit_cast<T>(static_cast<cpu::row_order::UnsignedOf<sizeof(T)>>(word)));
  }
  return list;
}

template <class T>
std::vector<std::int64_t> largest_first(const std::vector<T>& x) {
  std::vector<std::int64_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t i, std::int64_t j) {
    const auto a = static_cast<compute_t<T>>(x[static_cast<std::size_t>(i)]),
               b = static_cast<compute_t<T>>(x[static_cast<std::size_t>(j)]);
    return a != a ? b == b : b == b && a > b;
  });
  return order;
}

}  // namespace

TEMPLATE_TEST_CASE("topk has the order of a stable sort, for every dtype and way to find it", "[one thread]",
                   double, float, Half, BFloat16, std::int64_t, std::int32_t, std::uint8_t, bool) {
  using T = TestType;
  for (const std::int64_t n : {1, 2, 9, 511, 512, 513, 4099})
    for (const bool few : {true, false}) {
      const std::vector<T> values = few ? few_values<T>(n, 1) : any_values<T>(n, 2);
      const Tensor x = Tensor::from(values, {n});
      const auto expected = largest_first(values);
      for (const std::int64_t k : {std::int64_t{1}, (n + 15) / 16, (n + 1) / 2, n}) {
        INFO(n << " values, " << k << " places");
        const TopK found = topk(x, k);
        CHECK(found.indices.template to_vector<std::int64_t>() ==
              std::vector(expected.begin(), expected.begin() + k));
        CHECK(same_bits(found.values, index_select(x, 0, found.indices)));
      }
    }
}
