#include "runtime/apply.h"

#include "runtime/context.h"

namespace sherd {

AnyOp::~AnyOp() = default;

namespace {

/// Residency of a call's inputs: everything is brought here and stays until the scope ends. Plain storages
/// cost one look each.
class Pinned {
 public:
  explicit Pinned(Inputs in) : in_(in) {
    for (const Tensor& t : in)
      if (t.defined() && t.storage().owned()) [[unlikely]]
        pin(t.storage());
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

/// The time of a kernel: what it applies inside is not heard.
class InsideOp {
 public:
  explicit InsideOp(Context& context) : context_(context), outer_(context.inside_op()) {
    context.set_inside_op(true);
  }
  ~InsideOp() { context_.set_inside_op(outer_); }
  InsideOp(const InsideOp&) = delete;
  InsideOp& operator=(const InsideOp&) = delete;

 private:
  Context& context_;
  bool outer_;
};

Device device_of(const AnyOp& op, Inputs in, Outputs out) {
  const Device* device = nullptr;
  Device first;
  for (const Tensor& t : in) {
    if (!t.defined()) continue;
    if (device == nullptr) {
      first = t.device();
      device = &first;
    } else if (t.device() != first && !op.crosses_devices()) [[unlikely]] {
      // Not by `check`: the words would be made for every call.
      fail<DeviceError>("{}: inputs are on {} and {}; move one with to(device)", op.name(), to_string(first),
                        to_string(t.device()));
    }
  }
  return device != nullptr || out.empty() ? first : out[0].device();
}

void run_inside(const AnyOp& op, Inputs in, Outputs out, Context& context) {
  const Device device = device_of(op, in, out);
  const InsideOp inside(context);
  op.run(device, in, out);
}

}  // namespace

Tensors apply(const AnyOp& op, Inputs in) {
  Context& context = Context::current();
  const Pinned pinned(in);
  const bool heard = !context.inside_op();
  if (op.mutating() && heard)
    for (Listener* listener : context.listeners()) listener->before_write(op, in);
  if (op.mutating())
    for (std::size_t i = 0; i < in.size(); ++i)
      if (op.writes(i) && in[i].defined() && in[i].storage().owned()) [[unlikely]]
        in[i].storage().owner()->before_write(in[i].storage());
  Tensors out;
  // Devices before shapes: a tensor on the wrong device is the likelier mistake.
  if (in.size() > 1) device_of(op, in, {});
  op.prepare(in, out);
  run_inside(op, in, out, context);
  if (op.mutating())
    for (std::size_t i = 0; i < in.size(); ++i)
      if (op.writes(i)) in[i].storage().bump_version();
  if (heard)
    for (Listener* listener : context.listeners()) listener->after(op, in, out);
  return out;
}

void run_again(const AnyOp& op, Inputs in, Outputs out) {
  const Pinned pinned(in);
  run_inside(op, in, out, Context::current());
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
