#include "runtime/distances.h"

#include <limits>

#include "runtime/elementwise.h"
#include "runtime/given.h"

namespace sherd {
namespace {

void check_floating(std::string_view call, const Tensor& a, const Tensor& b) {
  check<DTypeError>(is_floating(a.dtype()) && a.dtype() == b.dtype(),
                    "{}: takes two tensors of one floating dtype, got {} and {}; cast one", call,
                    name_of(a.dtype()), name_of(b.dtype()));
}

/// What `f` computes of both, 16-bit floats in f32.
template <class F>
Tensor in_wide(const Tensor& a, const Tensor& b, F&& f) {
  return detail::in_compute_dtype(Tensors{a, b}, [&](Inputs in) { return f(in[0], in[1]); });
}

/// Roots of what is not below zero, whose gradient at zero is zero.
Tensor root(const Tensor& x) {
  const Tensor is_zero = less_equal(x, 0);
  return where(is_zero, 0.0, sqrt(where(is_zero, 1.0, x)));
}

/// (..., P, R) by products of matrices.
Tensor euclidean(const Tensor& a, const Tensor& b) {
  const auto squares = [](const Tensor& x) { return sum(square(x), {-1}, Keep::dims); };
  const Tensor both = add(squares(a), transpose(squares(b), -1, -2));
  return root(sub(both, mul(matmul(a, transpose(b, -1, -2)), 2)));
}

}  // namespace

Tensor cosine_similarity(const Tensor& a, const Tensor& b, std::int64_t axis, double eps) {
  detail::check_given("cosine_similarity", a, b);
  check_floating("cosine_similarity", a, b);
  return in_wide(a, b, [&](const Tensor& x, const Tensor& y) {
    const Shape both = broadcast_shapes("cosine_similarity", x.shape(), y.shape());
    const int at = normalize_axis("cosine_similarity", axis, both.rank());
    const auto unit = [&](const Tensor& t) {
      const Tensor whole = expand(t, both);
      return div(whole,
                 clamp(norm(whole, 2, {at}, Keep::dims), eps, std::numeric_limits<double>::infinity()));
    };
    return sum(mul(unit(x), unit(y)), {at});
  });
}

Tensor pairwise_distance(const Tensor& a, const Tensor& b, double p, double eps, Keep keep) {
  detail::check_given("pairwise_distance", a, b);
  check_floating("pairwise_distance", a, b);
  return in_wide(a, b,
                 [&](const Tensor& x, const Tensor& y) { return norm(add(sub(x, y), eps), p, {-1}, keep); });
}

Tensor cdist(const Tensor& a, const Tensor& b, double p) {
  detail::check_given("cdist", a, b);
  check_floating("cdist", a, b);
  check<ShapeError>(a.rank() >= 2 && b.rank() >= 2 && a.size(-1) == b.size(-1),
                    "cdist: takes (..., P, M) and (..., R, M), got {} and {}", a.shape(), b.shape());
  check<ValueError>(p >= 0, "cdist: p {} is below 0", p);
  constexpr std::int64_t few = 25;  // as in PyTorch
  return in_wide(a, b, [&](const Tensor& x, const Tensor& y) {
    if (p == 2 && (x.size(-2) > few || y.size(-2) > few)) return euclidean(x, y);
    const Tensor apart = sub(unsqueeze(x, -2), unsqueeze(y, -3));
    return x.size(-1) == 0 ? sum(apart, {-1}) : norm(apart, p, {-1});  // of no column any norm is 0
  });
}

}  // namespace sherd
