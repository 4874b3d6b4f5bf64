#include "tests/scenarios/checks.h"

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
  return actual == expected || std::abs(actual - expected) <= t.absolute + t.relative * std::abs(expected);
}

void compare(const Tensor& actual, const Tensor& expected, Nan nan, std::string_view what) {
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
}

}  // namespace

void Checks::eq(const Tensor& actual, const Tensor& expected, std::string_view what) {
  ++count_;
  compare(actual, expected, Nan::equal, what);
}

void Checks::close(const Tensor& actual, const Tensor& expected, std::string_view what) {
  ++count_;
  compare(actual, expected, Nan::unequal, what);
  expect(actual.device() == expected.device(), "{}: on {} instead of {}", what, show(actual.device()),
         show(expected.device()));
}

void Checks::contains(std::string_view message, std::string_view text, std::string_view what) {
  ++count_;
  expect(message.find(text) != std::string_view::npos, "{}: '{}' lacks '{}'", what, message, text);
}

}  // namespace sherd::scenarios
