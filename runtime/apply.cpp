#include "runtime/apply.h"

#include "runtime/context.h"

namespace sherd {

AnyOp::~AnyOp() = default;

namespace {

/// Residency of a call's inputs: everything is brought here and stays until the scope ends. Plain storages cost one look each.
class Pinned {
 public:
  explicit Pinned(Inputs in) : in_(in) {
    for (const Tensor& t : in)
      if (t.defined() && t.storage().owned()) [[unlikely]] pin(t.storage());
  }
  ~Pinned() { unpin(); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  void pin(Storage& storage) {
    // Pin all first: bringing one input here must not evict another.
    if (!pinned_) {
      for (const Tensor& t : in_)
        if (t.defined() && t.storage().owned()) t.storage().pin();
      pinned_ = true;
    }
    if (!storage.resident()) {
      try {
        storage.owner()->need(storage);
      } catch (...) {
        unpin();
        throw;
      }
    }
  }
  void unpin() {
    if (pinned_)
      for (const Tensor& t : in_)
        if (t.defined() && t.storage().owned()) t.storage().unpin();
  }
  Inputs in_;
  bool pinned_ = false;
};

Device device_of(const AnyOp& op, Inputs in, Outputs out) {
  const Device* device = nullptr;
  Device first;
  for (const Tensor& t : in) {
    if (!t.defined()) continue;
    if (device == nullptr) {
      first = t.device();
      device = &first;
    } else {
      check<DeviceError>(op.crosses_devices() || t.device() == first,
                         "{}: inputs are on {} and {}; move one with to(device)", op.name(), to_string(first),
                         to_string(t.device()));
    }
  }
  return device != nullptr || out.empty() ? first : out[0].device();
}

}  // namespace

Tensors apply(const AnyOp& op, Inputs in) {
  Context& context = Context::current();
  const Pinned pinned(in);
  if (op.mutating())
    for (Listener* listener : context.listeners()) listener->before_write(op, in);
  Tensors out;
  // Devices before shapes: a tensor on the wrong device is the likelier mistake.
  if (in.size() > 1) device_of(op, in, {});
  op.prepare(in, out);
  op.run(device_of(op, in, out), in, out);
  if (op.mutating())
    for (std::size_t i = 0; i < in.size(); ++i)
      if (op.writes(i)) in[i].storage().bump_version();
  for (Listener* listener : context.listeners()) listener->after(op, in, out);
  return out;
}

void run_again(const AnyOp& op, Inputs in, Outputs out) {
  const Pinned pinned(in);
  op.run(device_of(op, in, out), in, out);
}

namespace detail {

bool run_backend_kernel(std::type_index type, const void* op, Device device, Inputs in, Outputs out) {
  const Kernel kernel = backend(device.type).kernel(type);
  if (kernel != nullptr) kernel(op, in, out);
  return kernel != nullptr;
}

void refuse_device(std::string_view op, Device device) {
  fail<NotImplementedError>("{}: has no kernel for {}; move its inputs to cpu", op, to_string(device));
}

void make_view(const Tensor& base, Layout layout, Tensors& out) {
  auto impl = make_ref<TensorImpl>(base.storage_ref(), std::move(layout), base.dtype());
  impl->view = true;
  impl->view_version = base.storage().version();
  out.emplace_back(std::move(impl));
}

}  // namespace detail
}  // namespace sherd
