#include "runtime/cpu/reduce.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "runtime/context.h"
#include "tests/catch.h"

using namespace sherd;

namespace {

template <class T>
T element(std::int64_t i) {
  const std::int64_t v = (i * 7919 + 13) % 61;
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(v % 2 + (sizeof(T) > 1 ? v - 30 : 0));
  } else {
    return T(compute_t<T>((v - 30) / 8.0));
  }
}
template <class T>
double value(T x) {
  if constexpr (std::is_integral_v<T>)
    return double(x);
  else
    return double(compute_t<T>(x));
}

/// The three ways a view can lie in memory, beside a contiguous one.
std::vector<cpu::StridedReduction> layouts(std::int64_t outer, std::int64_t reduce, std::int64_t inner) {
  return {cpu::StridedReduction::contiguous(outer, reduce, inner),
          {outer, reduce, inner, 1, outer, outer * reduce},
          {outer, reduce, inner, reduce * 2, 2, outer * reduce * 2},
          {outer, reduce, inner, 0, 1, 0}};
}
std::int64_t span(const cpu::StridedReduction& r) {
  return (r.outer - 1) * r.outer_stride + (r.reduce - 1) * r.reduce_stride + (r.inner - 1) * r.inner_stride +
         1;
}

template <class F>
void for_views(const F& body) {
  for (auto [outer, reduce, inner] : {std::array{1, 1, 1},
                                      {3, 5, 1},
                                      {3, 40, 7},
                                      {1, 1000, 130},
                                      {70, 33, 20},
                                      {1, 50000, 1},
                                      {2, 5, 3000},
                                      {1, 3, 2}}) {
    for (const cpu::StridedReduction& r : layouts(outer, reduce, inner)) {
      INFO("outer " << outer << " reduce " << reduce << " inner " << inner << " strides " << r.outer_stride
                    << " " << r.reduce_stride << " " << r.inner_stride);
      body(r);
    }
  }
}

}  // namespace

TEMPLATE_TEST_CASE("sums equal the sums written out, in any layout and with any number of threads", "", float,
                   double, Half, BFloat16, std::int64_t, std::int32_t, std::uint8_t) {
  using T = TestType;
  for_views([](const cpu::StridedReduction& r) {
    std::vector<T> x;
    for (std::int64_t i = 0; i < span(r); ++i) x.push_back(element<T>(i));
    std::vector<cpu::sum_t<T>> one(r.outer * r.inner), two(one);
    const double divisor = std::is_integral_v<T> ? 1 : static_cast<double>(r.reduce);
    Context::current().set_threads(1);
    cpu::sum(r, x.data(), divisor, one.data());
    Context::current().set_threads(2);
    cpu::sum(r, x.data(), divisor, two.data());
    CHECK(std::memcmp(one.data(), two.data(), one.size() * sizeof(one[0])) == 0);
    double worst = 0;
    for (std::int64_t o = 0; o < r.outer; ++o) {
      for (std::int64_t j = 0; j < r.inner; ++j) {
        double want = 0;
        for (std::int64_t i = 0; i < r.reduce; ++i)
          want += value(x[o * r.outer_stride + i * r.reduce_stride + j * r.inner_stride]);
        worst = std::max(worst, std::abs(value(one[o * r.inner + j]) - want / divisor));
      }
    }
    CHECK(worst <= (std::is_integral_v<T> ? 0 : sizeof(T) == 2 ? 2e-2 : 1e-5));
  });
}

TEMPLATE_TEST_CASE("maximum and minimum give the first extreme element, and NaN before all", "[one thread]",
                   float, double, Half, BFloat16, std::int64_t, std::int32_t, std::uint8_t) {
  using T = TestType;
  for_views([](const cpu::StridedReduction& r) {
    for (std::int64_t nans : {0, 2}) {
      std::vector<T> x;
      for (std::int64_t i = 0; i < span(r); ++i) x.push_back(element<T>(i));
      if constexpr (!std::is_integral_v<T>) {
        for (std::int64_t i = 0; i < nans; ++i)
          x[x.size() / (2 + i)] = T(std::numeric_limits<compute_t<T>>::quiet_NaN());
      }
      std::vector<T> top(r.outer * r.inner), low(top);
      std::vector<std::int64_t> top_at(top.size()), low_at(top.size());
      cpu::maximum(r, x.data(), top.data(), top_at.data());
      cpu::minimum(r, x.data(), low.data(), low_at.data());
      bool right = true;
      for (std::int64_t o = 0; o < r.outer; ++o) {
        for (std::int64_t j = 0; j < r.inner; ++j) {
          const auto at = [&](std::int64_t i) {
            return value(x[o * r.outer_stride + i * r.reduce_stride + j * r.inner_stride]);
          };
          std::int64_t best = 0, least = 0;
          for (std::int64_t i = 1; i < r.reduce; ++i) {
            if (at(i) > at(best) || (std::isnan(at(i)) && !std::isnan(at(best)))) best = i;
            if (at(i) < at(least) || (std::isnan(at(i)) && !std::isnan(at(least)))) least = i;
          }
          const auto same = [](double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); };
          const std::int64_t k = o * r.inner + j;
          right &= top_at[k] == best && low_at[k] == least && same(value(top[k]), at(best)) &&
                   same(value(low[k]), at(least));
        }
      }
      CHECK(right);
    }
  });
}

TEST_CASE("an empty reduction sums to zero and an empty result writes nothing") {
  float out = 7;
  cpu::sum<float>(cpu::StridedReduction::contiguous(1, 0, 1), nullptr, 1, &out);
  CHECK(out == 0);
  cpu::sum<float>(cpu::StridedReduction::contiguous(0, 4, 1), nullptr, 1, &out);
  cpu::sum<float>(cpu::StridedReduction::contiguous(3, 4, 0), nullptr, 1, &out);
  CHECK(out == 0);
}

TEMPLATE_TEST_CASE("the error of a sum does not grow with its length, along any axis", "[one thread]", float,
                   double, Half, BFloat16) {
  using T = TestType;
  using C = compute_t<T>;
  const T tenth = T(C(0.1));
  for (std::int64_t reduce : {1000, 100000, 1 << 22}) {
    for (std::int64_t inner : {1, 2, 3, 40}) {
      if (reduce * inner > 1 << 23) continue;
      const std::vector<T> x(static_cast<std::size_t>(reduce * inner * 2), tenth);
      const double exact = value(tenth) * static_cast<double>(reduce);
      for (const cpu::StridedReduction& r : {cpu::StridedReduction::contiguous(1, reduce, inner),
                                             cpu::StridedReduction{1, reduce, inner, 0, 2 * inner, 2},
                                             cpu::StridedReduction{inner, reduce, 1, reduce, 1, 1},
                                             cpu::StridedReduction{1, reduce, inner, 0, 1, reduce}}) {
        for (double divisor : {1.0, static_cast<double>(reduce)}) {
          std::vector<T> out(static_cast<std::size_t>(r.outer * r.inner));
          cpu::sum(r, x.data(), divisor, out.data());
          INFO("reduce " << reduce << " inner " << inner << " divisor " << divisor << " error "
                         << (value(out[0]) / (exact / divisor) - 1));
          const double want = value(T(static_cast<C>(exact / divisor)));
          for (T got : out)
            CHECK((value(got) == want || std::abs(value(got) - exact / divisor) <= 5e-7 * exact / divisor));
        }
      }
    }
  }
}
