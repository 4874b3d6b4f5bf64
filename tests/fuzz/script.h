// What fuzz targets make of bytes: numbers near zero, near sizes, or at the ends of i64.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <limits>

#include "runtime/element.h"
#include "runtime/number.h"
#include "runtime/shape.h"

namespace sherd::test {

// A broken promise must stop the fuzzer, and the replay, where it is.
inline void require(bool ok) {
  if (!ok) std::abort();
}

class Script {
 public:
  Script(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}
  bool done() const { return left_ == 0; }
  std::uint8_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  /// Mostly small, sometimes an edge of its type.
  std::int64_t integer() {
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max(),
                           least = std::numeric_limits<std::int64_t>::min();
    constexpr std::int64_t edges[] = {most,
                                      least,
                                      most - 1,
                                      least + 1,
                                      std::int64_t{1} << 62,
                                      std::int64_t{1} << 32,
                                      -(std::int64_t{1} << 32),
                                      1 << 30};
    const std::uint8_t b = byte();
    return b < 208 ? static_cast<std::int64_t>(b % 16) - 4 : edges[b % 8];
  }
  Number number() {
    constexpr double values[] = {0.5, -1.5, 1e300, -1e300, 3.0, 1e-300, 255, 256};
    const std::uint8_t b = byte();
    if (b % 4 == 0) return b % 8 == 0;
    if (b % 4 == 1) return values[b / 4 % 8];
    return integer();
  }
  Shape shape() {
    Shape s;
    for (int rank = byte() % 5; rank > 0; --rank) s.push_back(integer());
    return s;
  }
  DType dtype() { return all_dtypes[byte() % 8]; }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

}  // namespace sherd::test
