#include "tests/cuda/compare.h"

#include <bit>
#include <cmath>
#include <limits>

namespace sherd::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

template <class T>
Tensor from_doubles(const std::vector<double>& values, Shape shape) {
  Tensor out = empty(std::move(shape), {dtype_of<T>});
  T* data = out.mutable_data<T>();
  for (std::size_t i = 0; i < values.size(); ++i)
    data[i] = static_cast<T>(static_cast<compute_t<T>>(values[i]));
  return out;
}

/// Floats of one sign in the order of their values.
template <class T>
std::int64_t place(T x) {
  if constexpr (std::is_same_v<T, double>)
    return std::bit_cast<std::int64_t>(std::fabs(x));
  else if constexpr (std::is_same_v<T, float>)
    return std::bit_cast<std::int32_t>(std::fabs(x));
  else
    return x.bits & 0x7fff;
}

template <class T>
double ulps(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return a == b ? 0 : infinity;
  } else {
    const auto x = static_cast<compute_t<T>>(a), y = static_cast<compute_t<T>>(b);
    if (x == y || (std::isnan(x) && std::isnan(y))) return 0;
    if (std::isnan(x) || std::isnan(y)) return infinity;
    // Subtracted as integers: a double cannot hold the places of two neighbouring doubles apart.
    const std::int64_t from = place(a), to = place(b);
    return static_cast<double>(std::signbit(x) == std::signbit(y) ? (from > to ? from - to : to - from)
                                                                  : from + to);
  }
}

}  // namespace

Tensor Values::operator()(Shape shape, DType dtype, double low, double high) {
  std::uniform_real_distribution<double> uniform(low, high);
  std::vector<double> values(static_cast<std::size_t>(shape.numel()));
  for (double& v : values) {
    v = uniform(engine_);
    if (!is_floating(dtype)) v = std::floor(dtype == DType::u8 ? std::fabs(v) : v);
  }
  return with_element(dtype, [&]<class T>() { return from_doubles<T>(values, shape); });
}

Tensor Values::with_specials(Shape shape, DType dtype) {
  const double specials[] = {0.0,   -0.0,   infinity, -infinity, std::nan(""), 1,    -1,
                             1e-41, -1e-41, 1e-6,     3e38,      -3e38,        88.7, -104};
  std::normal_distribution<double> normal(0, 3);
  std::vector<double> values(static_cast<std::size_t>(shape.numel()));
  for (double& v : values)
    v = engine_() % 3 == 0 ? specials[engine_() % std::size(specials)] : normal(engine_);
  return with_element(dtype, [&]<class T>() { return from_doubles<T>(values, shape); });
}

Tensor on_gpu(const Tensor& host) {
  const auto elements = static_cast<std::int64_t>(host.storage().bytes()) / size_of(host.dtype());
  const Tensor whole = alias(host, {Shape{elements}, Shape{1}, 0});
  const Tensor moved = to(whole, gpu);
  return alias(moved, host.layout());
}

double distance_in_ulps(const Tensor& a, const Tensor& b) {
  if (a.shape() != b.shape() || a.dtype() != b.dtype()) return infinity;
  return with_element(a.dtype(), [&]<class T>() {
    const std::vector<T> x = a.to_vector<T>(), y = b.to_vector<T>();
    double worst = 0;
    for (std::size_t i = 0; i < x.size(); ++i) worst = std::max(worst, ulps<T>(x[i], y[i]));
    return worst;
  });
}

double relative_distance(const Tensor& a, const Tensor& b) {
  if (a.shape() != b.shape() || a.dtype() != b.dtype()) return infinity;
  return with_element(a.dtype(), [&]<class T>() {
    const std::vector<T> x = a.to_vector<T>(), y = b.to_vector<T>();
    double apart = 0, size = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const auto p = static_cast<double>(static_cast<compute_t<T>>(x[i]));
      const auto q = static_cast<double>(static_cast<compute_t<T>>(y[i]));
      if (p == q || (std::isnan(p) && std::isnan(q))) continue;
      apart += (p - q) * (p - q);
    }
    for (const T& v : y) {
      const auto q = static_cast<double>(static_cast<compute_t<T>>(v));
      if (std::isfinite(q)) size += q * q;
    }
    const double distance = std::sqrt(apart) / std::max(std::sqrt(size), 1e-30);
    return std::isnan(distance) ? infinity : distance;
  });
}

double rounding(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 1e-15;
    case DType::f32:
      return 1e-6;
    case DType::f16:
      return 1e-3;
    case DType::bf16:
      return 8e-3;
    default:
      return 0;
  }
}

}  // namespace sherd::test
