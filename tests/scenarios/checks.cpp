#include "tests/scenarios/checks.h"

#include <algorithm>
#include <cmath>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "tests/tolerance.h"

namespace sherd::scenarios {
namespace {

using test::expect, test::Tolerance, test::tolerance_of;

std::vector<double> values_of(const Tensor& t) {
  const NoGrad guard;
  return to(t.detach(), f64).to_vector<double>();
}

enum class Nan { equal, unequal };

bool within(double actual, double expected, Tolerance t, Nan nan) {
  if (std::isnan(actual) || std::isnan(expected))
    return nan == Nan::equal && std::isnan(actual) && std::isnan(expected);
  if (actual == expected) return true;
  return std::isfinite(expected) &&
         std::abs(actual - expected) <= t.absolute + t.relative * std::abs(expected);
}

/// Returns whether there was a value other than zero to compare with.
bool compare(const Tensor& actual, const Tensor& expected, Nan nan, std::string_view what) {
  expect(actual.defined() && expected.defined(), "{}: one of the tensors is none", what);
  expect(actual.shape() == expected.shape(), "{}: shape {} instead of {}", what, actual.shape(),
         expected.shape());
  expect(actual.dtype() == expected.dtype(), "{}: dtype {} instead of {}", what, show(actual.dtype()),
         show(expected.dtype()));
  const std::vector<double> a = values_of(actual), e = values_of(expected);
  const Tolerance tolerance = tolerance_of(expected.dtype());
  for (std::size_t i = 0; i < e.size(); ++i)
    expect(within(a[i], e[i], tolerance, nan), "{}: element {} of {} is {} instead of {}", what, i,
           expected.shape(), a[i], e[i]);
  return std::ranges::any_of(e, [](double value) { return value != 0; });
}

}  // namespace

void Checks::count(bool of_something) {
  ++count_;
  ++(of_something ? of_something_ : of_zeros_);
}

void Checks::end() const {
  expect(count_ > 0, "nothing was compared");
  expect(of_zeros_ <= of_something_, "of {} comparisons of tensors {} expect only zeros",
         of_zeros_ + of_something_, of_zeros_);
}

void Checks::eq(const Tensor& actual, const Tensor& expected, std::string_view what) {
  count(compare(actual, expected, Nan::equal, what));
}

void Checks::close(const Tensor& actual, const Tensor& expected, std::string_view what) {
  count(compare(actual, expected, Nan::unequal, what));
  expect(actual.device() == expected.device(), "{}: on {} instead of {}", what, show(actual.device()),
         show(expected.device()));
}

void Checks::contains(std::string_view message, std::string_view text, std::string_view what) {
  ++count_;
  expect(message.find(text) != std::string_view::npos, "{}: '{}' lacks '{}'", what, message, text);
}

}  // namespace sherd::scenarios
