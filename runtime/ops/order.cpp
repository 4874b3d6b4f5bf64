#include "runtime/order.h"

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "runtime/context.h"
#include "runtime/given.h"
#include "runtime/number.h"

namespace sherd {
namespace {

TensorOptions positions_on(const Tensor& x) { return {DType::i64, x.device()}; }

/// Where the elements of `x` (1-D) begin another value than the one before: bool.
Tensor begins(const Tensor& x) {
  const std::int64_t n = x.numel();
  const TensorOptions bits{DType::boolean, x.device()};
  if (n == 0) return zeros({0}, bits);
  return cat({ones({1}, bits), not_equal(narrow(x, 0, 1, n - 1), narrow(x, 0, 0, n - 1))});
}

/// Of `x` (1-D), whose equal elements stand together; `inverse` is in its order.
Unique of_runs(const Tensor& x) {
  const Tensor first = begins(x);
  const Tensor inverse = sub(cumsum(to(first, DType::i64), 0), 1);
  const Tensor values = masked_select(x, first);
  const Tensor counts = scatter_add(zeros({values.numel()}, positions_on(x)), 0, inverse, ones_like(inverse));
  return {values, inverse, counts};
}

void check_integers(std::string_view call, const Tensor& x) {
  check<DTypeError>(!is_floating(x.dtype()) && x.dtype() != DType::boolean, "{}: takes integers, got {}",
                    call, name_of(x.dtype()));
}

}  // namespace

Unique unique(const Tensor& x) {
  detail::check_given("unique", x);
  const NoGrad guard;
  const Picked sorted = sort(reshape(x, {x.numel()}), 0);
  const Unique runs = of_runs(sorted.values);
  const Tensor inverse = scatter(zeros({x.numel()}, positions_on(x)), 0, sorted.indices, runs.inverse);
  return {runs.values, reshape(inverse, x.shape()), runs.counts};
}

Unique unique_consecutive(const Tensor& x) {
  detail::check_given("unique_consecutive", x);
  const NoGrad guard;
  const Unique runs = of_runs(reshape(x, {x.numel()}));
  return {runs.values, reshape(runs.inverse, x.shape()), runs.counts};
}

Tensor bincount(const Tensor& x, const Tensor& weights, std::int64_t minimum) {
  detail::check_given("bincount", x);
  check_integers("bincount", x);
  check<ShapeError>(x.rank() == 1, "bincount: takes a 1-D tensor, got shape {}", x.shape());
  check<ValueError>(minimum >= 0, "bincount: a minimum of {} numbers is below 0", minimum);
  check<ShapeError>(!weights.defined() || weights.shape() == x.shape(),
                    "bincount: weights of shape {} for numbers of shape {}; give each one",
                    weights.defined() ? weights.shape() : Shape(), x.shape());
  std::int64_t count = minimum;
  const Tensor numbers = to(x, DType::i64);
  if (x.numel() > 0) {
    const Tensor ends = stack({amin(numbers), amax(numbers)});
    const std::vector<std::int64_t> range = ends.to_vector<std::int64_t>();
    check<ValueError>(range[0] >= 0, "bincount: {} is among the numbers, which start at 0", range[0]);
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max() / 8;  // numbers of 8 bytes
    check<ValueError>(range[1] < most, "bincount: {} is among the numbers, and no memory has as many counts",
                      range[1]);
    count = std::max(count, range[1] + 1);
  }
  const Tensor each = weights.defined() ? weights : ones_like(numbers);
  return scatter_add(zeros({count}, {each.dtype(), x.device()}), 0, numbers, each);
}

Tensor searchsorted(const Tensor& sorted, const Tensor& values, SearchSide side) {
  detail::check_given("searchsorted", sorted, values);
  const bool one_line = sorted.rank() == 1;
  bool fits = sorted.rank() >= 1 && (one_line || values.rank() == sorted.rank());
  for (int i = 0; fits && !one_line && i + 1 < sorted.rank(); ++i)
    fits = sorted.shape()[i] == values.shape()[i];
  check<ShapeError>(
      fits,
      "searchsorted: takes sorted (..., n) and values (..., m), or any values in sorted (n), got {} and {}",
      sorted.shape(), values.shape());
  check<DTypeError>(sorted.dtype() == values.dtype(),
                    "searchsorted: sorted has dtype {} and values {}; cast one", name_of(sorted.dtype()),
                    name_of(values.dtype()));
  const NoGrad guard;
  const std::int64_t n = sorted.size(-1);
  Tensor low = zeros(values.shape(), positions_on(values));
  if (n == 0 || values.numel() == 0) return low;
  const auto element = [&](const Tensor& at) {
    return one_line ? reshape(index_select(sorted, 0, reshape(at, {at.numel()})), at.shape())
                    : gather(sorted, -1, at);
  };
  // Bisection, all at once: every value has found its place after as many rounds as n has bits.
  Tensor high = full(values.shape(), n, positions_on(values));
  const Tensor not_a_number = is_floating(values.dtype()) ? isnan(values) : Tensor();
  for (int rounds = std::bit_width(static_cast<std::uint64_t>(n)); rounds > 0; --rounds) {
    const Tensor middle = floor_divide(add(low, high), 2), open = less(low, high);
    const Tensor here = element(minimum(middle, n - 1));
    Tensor behind = side == SearchSide::left ? less(here, values) : less_equal(here, values);
    if (not_a_number.defined()) {  // which stands behind all numbers
      const Tensor behind_numbers =
          side == SearchSide::left ? logical_and(not_a_number, logical_not(isnan(here))) : not_a_number;
      behind = logical_or(behind, behind_numbers);
    }
    const Tensor up = logical_and(open, behind);
    high = where(logical_and(open, logical_not(behind)), middle, high);
    low = where(up, add(middle, 1), low);
  }
  return low;
}

Picked median(const Tensor& x, std::int64_t axis, Keep keep) {
  detail::check_given("median", x);
  const int at = normalize_axis("median", axis, x.rank());
  if (x.rank() == 0) return {clone(x), zeros({}, positions_on(x))};
  const std::int64_t n = x.shape()[at];
  check<ValueError>(n > 0, "median: axis {} of shape {} has no elements", axis, x.shape());
  const Picked sorted = sort(x, at);
  Shape one = x.shape();
  one[at] = 1;
  Tensor place = full(one, (n - 1) / 2, positions_on(x));
  if (is_floating(x.dtype())) {  // NaN stands last
    const Tensor numbers = sum(to(logical_not(isnan(x)), DType::i64), {at}, Keep::dims);
    place = where(less(numbers, n), numbers, place);
  }
  const Picked found{gather(sorted.values, at, place), gather(sorted.indices, at, place)};
  return keep == Keep::dims ? found : Picked{squeeze(found.values, at), squeeze(found.indices, at)};
}

Tensor median(const Tensor& x) {
  detail::check_given("median", x);
  return median(reshape(x, {x.numel()}), 0).values;
}

namespace {

/// Element `at` along `axis`, where it lies between two by `interpolation`; the axis goes.
Tensor element_at(const Tensor& sorted, int axis, double at, QuantileInterpolation interpolation) {
  const auto one = [&](double place) { return select(sorted, axis, static_cast<std::int64_t>(place)); };
  const double low = std::floor(at), high = std::ceil(at);
  switch (interpolation) {
    case QuantileInterpolation::lower:
      return one(low);
    case QuantileInterpolation::higher:
      return one(high);
    case QuantileInterpolation::nearest:
      return one(std::nearbyint(at));
    case QuantileInterpolation::linear:
    case QuantileInterpolation::midpoint:
      break;
  }
  if (low == high) return one(low);
  const double share = interpolation == QuantileInterpolation::midpoint ? 0.5 : at - low;
  const Tensor a = one(low), b = one(high);
  return share < 0.5 ? add(a, mul(sub(b, a), share)) : sub(b, mul(sub(b, a), 1 - share));
}

}  // namespace

Tensor quantile(const Tensor& x, std::span<const double> q, std::optional<std::int64_t> axis, Keep keep,
                QuantileInterpolation interpolation) {
  detail::check_given("quantile", x);
  check<DTypeError>(is_floating(x.dtype()), "quantile: takes floating dtypes, got {}; cast the input first",
                    name_of(x.dtype()));
  for (const double one : q)
    check<ValueError>(one >= 0 && one <= 1, "quantile: q {} is not from 0 to 1", one);
  const bool of_all = !axis || x.rank() == 0;
  const int at = axis ? normalize_axis("quantile", *axis, x.rank()) : 0;
  const Tensor lines = of_all ? reshape(x, {x.numel()}) : x;
  const std::int64_t n = lines.size(at);
  check<ValueError>(n > 0, "quantile: shape {} has no elements to choose from", x.shape());
  Shape kept = x.shape();
  for (int i = 0; i < kept.rank(); ++i)
    if (of_all || i == at) kept[i] = 1;
  const Tensor sorted = to(sort(lines, at).values, compute_dtype(x.dtype()));
  const Tensor none = any(isnan(sorted), {at});
  std::vector<Tensor> found;
  for (const double one : q) {
    const Tensor element = element_at(sorted, at, one * static_cast<double>(n - 1), interpolation);
    const Tensor value = to(where(none, std::numeric_limits<double>::quiet_NaN(), element), x.dtype());
    found.push_back(keep == Keep::dims ? reshape(value, kept) : value);
  }
  check<ValueError>(!found.empty(), "quantile: no q is given");
  return stack(found);
}

Tensor quantile(const Tensor& x, double q, std::optional<std::int64_t> axis, Keep keep,
                QuantileInterpolation interpolation) {
  return squeeze(quantile(x, std::span(&q, 1), axis, keep, interpolation), 0);
}

}  // namespace sherd
