// Tensors that show other memory.
#include "autograd/autograd.h"
#include "autograd/node.h"
#include "autograd/trace.h"
#include "runtime/given.h"

namespace sherd {
namespace {

void check_free(const Tensor& t) {
  const AutogradRecord* record = record_of(t);
  check<StateError>(record == nullptr || (!record->requires_grad && !record->edge),
                    "set_: a tensor of shape {} requires grad or has a history; set a detached one",
                    t.shape());
  check<StateError>(!t.storage().owned(),
                    "set_: an owner keeps the memory of a tensor of shape {} (a sharded parameter, or what a "
                    "region makes again); copy_ writes values",
                    t.shape());
}

}  // namespace

Tensor set_(const Tensor& tensor, const Tensor& data) {
  detail::check_given("set_", tensor, data);
  check<DTypeError>(tensor.dtype() == data.dtype(), "set_: a tensor of {} cannot show {}",
                    name_of(tensor.dtype()), name_of(data.dtype()));
  check<DeviceError>(tensor.device() == data.device(), "set_: a tensor on {} cannot show memory on {}",
                     tensor.device(), data.device());
  check_free(tensor);
  check_free(data);
  Tracer::announce_set(tensor);
  TensorImpl& impl = *tensor.impl();
  impl.storage = data.storage_ref();
  impl.layout = data.layout();
  impl.view = false;
  impl.alias = true;
  impl.view_version = data.storage().version();
  return tensor;
}

}  // namespace sherd
