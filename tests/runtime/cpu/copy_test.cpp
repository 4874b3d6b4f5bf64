#include "runtime/cpu/copy.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "runtime/ops.h"
#include "tests/catch.h"

using namespace sherd;

namespace {

/// The value of an element of any dtype.
double value_at(DType d, const void* data, std::int64_t i) {
  return with_element(
      d, [&]<class T>() { return double(static_cast<compute_t<T>>(static_cast<const T*>(data)[i])); });
}
void set_value(DType d, void* data, std::int64_t i, double value) {
  with_element(d, [&]<class T>() {
    if constexpr (std::is_same_v<T, bool>)
      static_cast<T*>(data)[i] = value != 0;
    else
      static_cast<T*>(data)[i] = T(static_cast<compute_t<T>>(value));
  });
}

struct Arrangement {
  std::vector<std::int64_t> sizes, strides;
  std::int64_t span() const {
    std::int64_t last = 1;
    for (std::size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
    return last;
  }
};

/// Memory in which the dimensions lie in the order `order`, the last one every `step` elements.
Arrangement laid_out(const std::vector<std::int64_t>& sizes, std::vector<int> order, std::int64_t step) {
  Arrangement l{sizes, std::vector<std::int64_t>(sizes.size())};
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    l.strides[*d] = step;
    step *= sizes[*d];
  }
  return l;
}

template <class F>
void for_indices(const std::vector<std::int64_t>& sizes, const F& body) {
  const std::int64_t n = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
  for (std::int64_t i = 0; i < n; ++i) {
    std::vector<std::int64_t> index(sizes.size());
    std::int64_t rest = i;
    for (std::size_t d = sizes.size(); d-- > 0; rest /= sizes[d]) index[d] = rest % sizes[d];
    body(index);
  }
}
std::int64_t place(const Arrangement& l, const std::vector<std::int64_t>& index) {
  return std::inner_product(index.begin(), index.end(), l.strides.begin(), std::int64_t{0});
}

bool copies_right(DType from_dtype, const Arrangement& from, DType to_dtype, const Arrangement& to) {
  std::vector<std::byte> source(from.span() * size_of(from_dtype)), target(to.span() * size_of(to_dtype));
  for (std::int64_t i = 0; i < from.span(); ++i) set_value(from_dtype, source.data(), i, (i * 37 + 11) % 101);
  for (std::int64_t i = 0; i < to.span(); ++i) set_value(to_dtype, target.data(), i, 1);
  cpu::copy(from.sizes, from_dtype, source.data(), from.strides, to_dtype, target.data(), to.strides);
  bool right = true;
  std::vector<bool> touched(to.span());
  for_indices(to.sizes, [&](const std::vector<std::int64_t>& index) {
    const double want = value_at(from_dtype, source.data(), place(from, index));
    const double got = value_at(to_dtype, target.data(), place(to, index));
    right &= got == (to_dtype == boolean ? want != 0 : want);
    touched[place(to, index)] = true;
  });
  for (std::int64_t i = 0; i < to.span(); ++i)
    right &= touched[i] || value_at(to_dtype, target.data(), i) == 1;
  return right;
}

}  // namespace

TEST_CASE("what becomes 16 bits is rounded once, of every dtype that has more digits") {
  // Around the middle between neighbours, which f32 would round to: below, at, and above it.
  const auto check = [&]<class T>(T) {
    const DType dtype = dtype_of<T>;
    std::vector<double> given, expected, expected_whole;
    std::vector<std::int64_t> given_whole;
    for (std::uint32_t bits = 0; bits < 0x7fff; ++bits) {
      const auto low = double(float(T::from_bits(static_cast<std::uint16_t>(bits)))),
                 high = double(float(T::from_bits(static_cast<std::uint16_t>(bits + 1))));
      if (!std::isfinite(high)) break;
      const double middle = low + (high - low) / 2, even = bits % 2 == 0 ? low : high;
      for (const double sign : {1.0, -1.0})
        for (const auto& [value, rounded] : {std::pair(std::nextafter(middle, 0.0), low),
                                             {middle, even},
                                             {std::nextafter(middle, HUGE_VAL), high}}) {
          given.push_back(sign * value);
          expected.push_back(sign * rounded);
        }
      if (high - low < 4 || high >= 0x1p63) continue;  // one more or less is no rounding then
      const auto whole = static_cast<std::int64_t>(middle);
      for (const std::int64_t sign : {1, -1})
        for (const auto& [value, rounded] : {std::pair(whole - 1, low), {whole, even}, {whole + 1, high}}) {
          given_whole.push_back(sign * value);
          expected_whole.push_back(double(sign) * rounded);
        }
    }
    const auto n = static_cast<std::int64_t>(given.size()), m = static_cast<std::int64_t>(given_whole.size());
    REQUIRE(m > 100);
    CHECK(to(to(Tensor::from(given, {n}), dtype), f64).to_vector<double>() == expected);
    CHECK(to(to(Tensor::from(given_whole, {m}), dtype), f64).to_vector<double>() == expected_whole);
    const std::size_t step = 97;
    for (std::size_t i = 0; i < given.size(); i += step) {
      CHECK(to(Tensor::scalar(given[i], {dtype}), f64).item() == expected[i]);
      CHECK(to(full({3}, given[i], {dtype}), f64).to_vector<double>()[1] == expected[i]);
      CHECK(to(fill_(zeros({2}, {dtype}), given[i]), f64).to_vector<double>()[1] == expected[i]);
      if (std::abs(given[i]) < 1e15)
        CHECK(to(arange(given[i], given[i] + 1, 1, {dtype}), f64).to_vector<double>().at(0) == expected[i]);
    }
    for (std::size_t i = 0; i < given_whole.size(); i += step)
      CHECK(to(full({1}, given_whole[i], {dtype}), f64).item() == expected_whole[i]);
    for (const double special : {HUGE_VAL, -HUGE_VAL, 1e300, -1e300, 0.0, -0.0, 5e-324, -5e-324}) {
      const double got = double(float(T(special)));
      CHECK(got == double(float(T(float(special)))));
      CHECK(std::signbit(got) == std::signbit(special));
    }
    CHECK(std::isnan(float(T(std::nan("")))));
    for (const std::int64_t extreme : {INT64_MIN, INT64_MAX, std::int64_t{0}})
      CHECK(float(T(extreme)) == float(T(float(extreme))));
  };
  check(Half{});
  check(BFloat16{});
}

TEST_CASE("copies are right between all dtypes", "[one thread]") {
  for (DType from : all_dtypes) {
    for (DType to : all_dtypes) {
      INFO(name_of(from) << " to " << name_of(to));
      CHECK(copies_right(from, laid_out({70, 33}, {0, 1}, 1), to, laid_out({70, 33}, {0, 1}, 1)));
      CHECK(copies_right(from, laid_out({70, 33}, {1, 0}, 1), to, laid_out({70, 33}, {0, 1}, 2)));
    }
  }
}

TEST_CASE("copies are right for every order of dimensions, with gaps and with broadcasting", "[one thread]") {
  std::vector<std::int64_t> sizes = {3, 1, 40, 35};
  std::vector<int> order = {0, 1, 2, 3};
  do {
    for (std::int64_t step : {1, 3}) {
      const Arrangement plain = laid_out(sizes, {0, 1, 2, 3}, 1), other = laid_out(sizes, order, step);
      INFO("order " << order[0] << order[1] << order[2] << order[3] << " step " << step);
      CHECK(copies_right(f32, other, f32, plain));
      CHECK(copies_right(f32, plain, f32, other));
      CHECK(copies_right(f32, other, bf16, laid_out(sizes, {2, 3, 0, 1}, 1)));
      Arrangement broadcast = other;
      broadcast.strides[2] = 0;
      CHECK(copies_right(f32, broadcast, f64, plain));
    }
  } while (std::next_permutation(order.begin(), order.end()));
  CHECK(copies_right(f32, {{}, {}}, f32, {{}, {}}));
  CHECK(copies_right(f32, laid_out({100000}, {0}, 1), f16, laid_out({100000}, {0}, 1)));
  CHECK(copies_right(u8, laid_out({2, 2, 2, 2, 2, 2, 2, 3}, {7, 6, 5, 4, 3, 2, 1, 0}, 1), u8,
                     laid_out({2, 2, 2, 2, 2, 2, 2, 3}, {0, 1, 2, 3, 4, 5, 6, 7}, 1)));
}

TEST_CASE("an empty copy touches nothing") {
  const std::int64_t sizes[] = {3, 0, 2}, strides[] = {2, 2, 1};
  float target = 7;
  cpu::copy(sizes, f32, nullptr, strides, f32, &target, strides);
  CHECK(target == 7);
}
