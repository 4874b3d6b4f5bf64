// A number that the host reads some time after the device computed it.
#pragma once

#include "runtime/backend.h"
#include "runtime/tensor.h"

namespace sherd {

/// The value of a tensor with one element as it is now (ShapeError for another shape). Reading it waits for
/// the work that this rank had given to the device when this was made, and for none of what it gave later:
/// made at the end of a step and read in the next one, it stops no device. What an op wrote into the tensor
/// since is not seen.
class SHERD_API LateValue {
 public:
  LateValue() = default;
  explicit LateValue(const Tensor& value);
  /// The value as a double. StateError for one that was made without a tensor, and inside `capture`, as
  /// `item`.
  double read() const;

 private:
  Tensor copy_;  // 0-d f64 of its own
  std::shared_ptr<DeviceMark> mark_;
};

}  // namespace sherd
