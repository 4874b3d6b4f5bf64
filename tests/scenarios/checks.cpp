#include "tests/scenarios/checks.h"

#include <algorithm>
#include <bit>
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

void expect_alike(const Tensor& actual, const Tensor& expected, std::string_view what) {
  expect(actual.defined() && expected.defined(), "{}: one of the tensors is none", what);
  expect(actual.shape() == expected.shape(), "{}: shape {} instead of {}", what, actual.shape(),
         expected.shape());
  expect(actual.dtype() == expected.dtype(), "{}: dtype {} instead of {}", what, show(actual.dtype()),
         show(expected.dtype()));
}

bool has_values(const std::vector<double>& values) {
  return std::ranges::any_of(values, [](double value) { return value != 0; });
}

/// Returns whether there was a value other than zero to compare with.
bool compare(const Tensor& actual, const Tensor& expected, Nan nan, std::string_view what) {
  expect_alike(actual, expected, what);
  const std::vector<double> a = values_of(actual), e = values_of(expected);
  const Tolerance tolerance = tolerance_of(expected.dtype());
  for (std::size_t i = 0; i < e.size(); ++i)
    expect(within(a[i], e[i], tolerance, nan), "{}: element {} of {} is {} instead of {}", what, i,
           expected.shape(), a[i], e[i]);
  return has_values(e);
}

void expect_device(const Tensor& actual, const Tensor& expected, std::string_view what) {
  expect(actual.device() == expected.device(), "{}: on {} instead of {}", what, show(actual.device()),
         show(expected.device()));
}

}  // namespace

std::string show(shard::ShardingStrategy strategy) {
  switch (strategy) {
    case shard::ShardingStrategy::full_shard:
      return "full_shard";
    case shard::ShardingStrategy::shard_grad_op:
      return "shard_grad_op";
    case shard::ShardingStrategy::zero1:
      return "zero1";
    case shard::ShardingStrategy::no_shard:
      return "no_shard";
  }
  return {};
}

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
  expect_device(actual, expected, what);
}

void Checks::same(const Tensor& actual, const Tensor& expected, std::string_view what) {
  expect_alike(actual, expected, what);
  expect_device(actual, expected, what);
  const std::vector<double> a = values_of(actual), e = values_of(expected);  // every dtype fits in a double
  for (std::size_t i = 0; i < e.size(); ++i)
    expect(std::bit_cast<std::uint64_t>(a[i]) == std::bit_cast<std::uint64_t>(e[i]),
           "{}: element {} of {} is {} instead of {}", what, i, expected.shape(), a[i], e[i]);
  count(has_values(e));
}

void Checks::contains(std::string_view message, std::string_view text, std::string_view what) {
  ++count_;
  expect(message.find(text) != std::string_view::npos, "{}: '{}' lacks '{}'", what, message, text);
}

}  // namespace sherd::scenarios
