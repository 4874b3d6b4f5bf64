// Comparisons as the catalogue makes them: by the tolerances of the dtype, and counted.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include "runtime/tensor.h"
#include "shard/options.h"
#include "tests/ranks.h"

namespace sherd::scenarios {

inline std::string show(DType d) { return std::string(name_of(d)); }
inline std::string show(Device d) { return to_string(d); }
std::string show(shard::ShardingStrategy strategy);
template <class T>
std::string show(const T& value) {
  return fmt::format("{}", value);
}
template <class... T>
std::string show(const std::variant<T...>& value) {
  return std::visit([](const auto& v) { return show(v); }, value);
}

/// One rank's comparisons. The first that fails throws.
class Checks {
 public:
  /// Shape and dtype are equal, values within the tolerance of the dtype, NaN is equal to NaN. Devices may
  /// differ.
  void eq(const Tensor& actual, const Tensor& expected, std::string_view what);
  /// The same, but devices are equal, and NaN is equal to nothing.
  void close(const Tensor& actual, const Tensor& expected, std::string_view what);
  /// Shape, dtype, device and bits are equal.
  void same(const Tensor& actual, const Tensor& expected, std::string_view what);
  /// Everything else: to the bit.
  template <class T>
  void eq(const T& actual, const std::type_identity_t<T>& expected, std::string_view what) {
    ++count_;
    test::expect(actual == expected, "{}: {} instead of {}", what, show(actual), show(expected));
  }
  /// A message has this text in it.
  void contains(std::string_view message, std::string_view text, std::string_view what);

  /// At the end of a combination: something was compared, and mostly with other values than zeros.
  void end() const;
  std::int64_t count() const { return count_; }

 private:
  void count(bool of_something);
  std::int64_t count_ = 0, of_something_ = 0, of_zeros_ = 0;  // the last two: tensors
};

}  // namespace sherd::scenarios
