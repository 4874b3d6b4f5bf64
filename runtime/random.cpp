#include "runtime/random.h"

#include <cmath>
#include <limits>
#include <type_traits>

#include "runtime/dtype.h"
#include "runtime/generator.h"

namespace sherd {
namespace {

/// The neighbour of `x` in the direction of `to`.
float next(float x, float to) { return std::nextafter(x, to); }
template <class T>  // 16 bits, the sign first
T next(T x, float to) {
  const auto value = static_cast<float>(x);
  if (value == 0) return T::from_bits(to > 0 ? 0x0001 : 0x8001);
  const bool outwards = (to > value) == (value > 0);
  return T::from_bits(static_cast<std::uint16_t>(x.bits + (outwards ? 1 : -1)));
}

}  // namespace

std::uint64_t derived_seed(std::uint64_t seed, std::uint64_t stream) {
  if (stream == 0) return seed;
  constexpr std::uint64_t aside = 0x5eed5eed5eed5eed;  // a Philox stream number that random ops never use
  const PhiloxWords words = philox(seed, stream, aside);
  return std::uint64_t{words[1]} << 32 | words[0];
}

UniformRange uniform_range(DType dtype, double low, double high) {
  return with_floating("uniform", dtype, [&]<class Wanted>() -> UniformRange {
    using T = std::conditional_t<std::is_same_v<Wanted, double>, float, Wanted>;
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const auto rounded = [](double x) { return T(x); };
    const auto base = static_cast<float>(low), range = static_cast<float>(high - low);
    T first = rounded(low), last = rounded(high);
    check<ValueError>(low <= high, "uniform: range [{}, {}) is empty", low, high);
    check<ValueError>(std::isfinite(float(first)) && std::isfinite(float(last)) && std::isfinite(range),
                      "uniform: range [{}, {}) is more than {} holds; scale the result", low, high,
                      name_of(dtype));
    if (static_cast<double>(float(first)) < low) first = next(first, infinity);
    if (static_cast<double>(float(last)) >= high) last = next(last, -infinity);
    if (float(last) < float(first)) first = last = rounded(low);
    return UniformRange{base, range, float(first), float(last)};
  });
}

UniformRangeOf<double> uniform_range_f64(double low, double high) {
  check<ValueError>(low <= high, "uniform: range [{}, {}) is empty", low, high);
  check<ValueError>(std::isfinite(high - low),
                    "uniform: range [{}, {}) is more than f64 holds; scale the result", low, high);
  const double last = low < high ? std::nextafter(high, low) : low;
  return {low, high - low, low, last};
}

}  // namespace sherd
