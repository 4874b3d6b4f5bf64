#include "runtime/late_value.h"

#include "runtime/context.h"
#include "runtime/ops.h"

namespace sherd {

LateValue::LateValue(const Tensor& value) {
  check<ShapeError>(value.numel() == 1, "late value: needs a tensor with one element, got shape {}",
                    value.shape());
  const NoGrad guard;
  const Tensor element = reshape(value.detach(), {});
  copy_ = element.dtype() == DType::f64 ? clone(element) : to(element, DType::f64);
  mark_ = backend(copy_.device().type).mark(copy_.device());
}

double LateValue::read() const {
  check<StateError>(mark_ != nullptr, "late value: it was made without a tensor; assign one that was not");
  for (Listener* listener : Context::current().listeners()) listener->host_read(copy_);
  double value = 0;
  mark_->read(&value, copy_.storage().data(), sizeof value);
  return value;
}

}  // namespace sherd
