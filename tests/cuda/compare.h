// The same tensors on the host and on a GPU, and how far their values are apart.
#pragma once

#include <random>

#include "runtime/cuda/backend.h"
#include "runtime/ops.h"
#include "tests/catch.h"

namespace sherd::test {

inline constexpr Device gpu = Device::cuda(0);

/// Counts the running test case as skipped where no GPU is.
[[nodiscard]] inline bool no_gpu() { return skip_if(cuda_device_count() == 0, "no GPU here"); }
/// The same where less than two are.
[[nodiscard]] inline bool one_gpu() {
  return skip_if(cuda_device_count() < 2, cuda_device_count() == 0 ? "no GPU here" : "one GPU only");
}

/// Values of any dtype in [low, high] from a fixed stream; integers are whole, u8 starts at 0.
class Values {
 public:
  explicit Values(unsigned seed) : engine_(seed) {}
  Tensor operator()(Shape shape, DType dtype, double low = -2, double high = 2);
  /// The same with infinities, NaN, zeros of both signs and very small and large numbers among them.
  Tensor with_specials(Shape shape, DType dtype);

 private:
  std::mt19937 engine_;
};

/// A tensor on the GPU with the values and the layout in memory of `host`.
Tensor on_gpu(const Tensor& host);

/// Largest distance of two tensors of one shape and dtype: in units in the last place for floats (NaN equals
/// NaN), else 0 or infinity.
double distance_in_ulps(const Tensor& a, const Tensor& b);
/// ‖a - b‖ / ‖b‖ in double; infinity where one has a NaN and the other has none.
double relative_distance(const Tensor& a, const Tensor& b);
/// One rounding of a sum's terms, relative; what sums in another order may differ by.
double rounding(DType dtype);

}  // namespace sherd::test
