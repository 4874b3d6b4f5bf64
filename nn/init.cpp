#include "nn/init.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <numbers>

#include "runtime/context.h"
#include "runtime/math.h"
#include "runtime/ops.h"

namespace sherd::nn::init {

namespace {

/// Fills the whole parameter; of one that is shared among ranks this rank keeps its part, so that all draw
/// the same numbers.
template <class Fill>
void give_values(const Parameter& p, const Fill& fill) {
  const NoGrad guard;
  if (p.owner() == nullptr) return fill(p.data());
  const Tensor whole = empty(p.shape(), {p.local().dtype(), p.local().device()});
  fill(whole);
  p.owner()->set_whole(p, whole);
}

struct Fans {
  double in, out;
};

Fans fans_of(std::string_view call, const Shape& shape) {
  check<ShapeError>(shape.rank() >= 2, "{}: needs a matrix (out, in, ...), got shape {}", call, shape);
  double field = 1;
  for (int i = 2; i < shape.rank(); ++i) field *= static_cast<double>(shape[i]);
  return {static_cast<double>(shape[1]) * field, static_cast<double>(shape[0]) * field};
}

/// The share of the normal distribution above x >= 0.
double upper_share(double x) {
  const double t = x / std::numbers::sqrt2;
  return t < 1 ? (1 - math::erf(t)) / 2 : t > 6 ? 0 : math::exp(math::detail::log_erfc(t)) / 2;
}

double kaiming_deviation(std::string_view call, const Parameter& p, const KaimingOptions& o) {
  const Fans fans = fans_of(call, p.shape());
  return calculate_gain(o.nonlinearity, o.slope) / std::sqrt(o.mode == Fan::in ? fans.in : fans.out);
}

/// c[0] x^n + c[1] x^(n - 1) + ...
Tensor polynomial(const Tensor& x, std::initializer_list<double> c) {
  Tensor y = full(x.shape(), *c.begin(), {x.dtype(), x.device()});
  for (const double* next = c.begin() + 1; next != c.end(); ++next) y = add(mul(y, x), *next);
  return y;
}

/// The inverse of erf at 1 - 2 q (Giles, 2012), within 2e-7 of itself down to q = 1e-7, 1e-4 to 1e-9; not of
/// 1 - 2 q itself, which has too few digits of a small q.
Tensor erfinv_of_share(const Tensor& q) {
  const Tensor w = neg(add(log(mul(q, 4)), log1p(neg(q))));
  const Tensor middle =
      polynomial(sub(w, 2.5), {2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
                               -0.00125372503, -0.00417768164, 0.246640727, 1.50140941});
  const Tensor tail =
      polynomial(sub(sqrt(w), 3), {-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844,
                                   0.00573950773, -0.0076224613, 0.00943887047, 1.00167406, 2.83297682});
  return mul(where(less(w, 5), middle, tail), sub(1, mul(q, 2)));
}

/// Takes from `rows` what lies along the orthonormal rows `others`; the second time what rounding left.
void project_out(const Tensor& rows, const Tensor& others) {
  for (int pass = 0; pass < 2; ++pass) sub_(rows, matmul(matmul(rows, transpose(others, 0, 1)), others));
}

/// Makes the rows, which are no more than the columns, orthonormal by Gram and Schmidt.
void orthonormalize(const Tensor& x) {
  constexpr std::int64_t most = 64;  // rows that are taken together, for products of matrices
  for (std::int64_t first = 0; first < x.size(0); first += most) {
    const Tensor block = narrow(x, 0, first, std::min(most, x.size(0) - first));
    if (first > 0) project_out(block, narrow(x, 0, 0, first));
    for (std::int64_t i = 0; i < block.size(0); ++i) {
      const Tensor row = narrow(block, 0, i, 1);
      if (i > 0) project_out(row, narrow(block, 0, 0, i));
      div_(row, norm(row));
    }
  }
}

}  // namespace

void uniform_(Parameter p, double low, double high) {
  give_values(p, [&](const Tensor& t) { sherd::uniform_(t, low, high); });
}
void normal_(Parameter p, double mean, double stddev) {
  give_values(p, [&](const Tensor& t) { sherd::normal_(t, mean, stddev); });
}
void constant_(Parameter p, double value) {
  give_values(p, [&](const Tensor& t) { fill_(t, value); });
}
void xavier_uniform_(Parameter p, double gain) {
  const Fans fans = fans_of("xavier_uniform_", p.shape());
  if (p.numel() == 0) return;
  const double bound = gain * std::sqrt(6 / (fans.in + fans.out));
  uniform_(std::move(p), -bound, bound);
}
void xavier_normal_(Parameter p, double gain) {
  const Fans fans = fans_of("xavier_normal_", p.shape());
  if (p.numel() == 0) return;
  normal_(std::move(p), 0, gain * std::sqrt(2 / (fans.in + fans.out)));
}

double calculate_gain(Nonlinearity nonlinearity, double slope) {
  switch (nonlinearity) {
    case Nonlinearity::tanh:
      return 5.0 / 3;
    case Nonlinearity::relu:
      return std::numbers::sqrt2;
    case Nonlinearity::leaky_relu:
      return std::sqrt(2 / (1 + slope * slope));
    case Nonlinearity::selu:
      return 0.75;
    default:
      return 1;
  }
}

void kaiming_normal_(Parameter p, KaimingOptions options) {
  const double deviation = kaiming_deviation("kaiming_normal_", p, options);
  if (p.numel() > 0) normal_(std::move(p), 0, deviation);
}
void kaiming_uniform_(Parameter p, KaimingOptions options) {
  const double bound = std::numbers::sqrt3 * kaiming_deviation("kaiming_uniform_", p, options);
  if (p.numel() > 0) uniform_(std::move(p), -bound, bound);
}

void trunc_normal_(Parameter p, double mean, double stddev, double low, double high) {
  check<ValueError>(stddev > 0, "trunc_normal_: a standard deviation of {} is not positive", stddev);
  check<ValueError>(low < high, "trunc_normal_: no numbers between {} and {}", low, high);
  // The interval, or its mirror image, whose shares of the normal above its ends have all their digits.
  const bool mirrored = high < mean;
  const double from = (mirrored ? mean - high : low - mean) / stddev,
               to = (mirrored ? mean - low : high - mean) / stddev;
  const auto share_above = [](double x) { return x < 0 ? 1 - upper_share(-x) : upper_share(x); };
  const double least = share_above(to), range = share_above(from) - least;
  constexpr double farthest = 5.6;  // beyond, what erfinv is computed by has too few digits
  check<ValueError>(from <= farthest,
                    "trunc_normal_: [{}, {}] begins {} standard deviations from the mean; at most {} can be "
                    "drawn",
                    low, high, from, farthest);
  give_values(p, [&](const Tensor& t) {
    const Tensor u = add(rand(t.shape(), {DType::f64, t.device()}), 0x1p-25);  // never 0
    const Tensor x = mul(erfinv_of_share(add(mul(u, range), least)), stddev * std::numbers::sqrt2);
    copy_(t, clamp(mirrored ? sub(mean, x) : add(x, mean), low, high));
  });
}

void orthogonal_(Parameter p, double gain) {
  check<ShapeError>(p.shape().rank() >= 2, "orthogonal_: needs a matrix (out, in, ...), got shape {}",
                    p.shape());
  if (p.numel() == 0) return;
  const std::int64_t rows = p.shape()[0], columns = p.numel() / rows;
  give_values(p, [&](const Tensor& t) {
    const Tensor basis = randn({std::min(rows, columns), std::max(rows, columns)}, {DType::f64, t.device()});
    orthonormalize(basis);
    copy_(t, reshape(mul(rows <= columns ? basis : transpose(basis, 0, 1), gain), t.shape()));
  });
}

}  // namespace sherd::nn::init
