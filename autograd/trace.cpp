#include "autograd/trace.h"

#include "autograd/tape.h"

namespace sherd {

namespace {
/// Tracers that listen on this rank.
struct Tracing {
  std::vector<Tracer*> tracers;
};
std::vector<Tracer*>& tracing() { return Context::current().slot<Tracing>().tracers; }
}  // namespace

Tracer::Tracer(std::string call) : call_(std::move(call)) { tracing().push_back(this); }
Tracer::~Tracer() { std::erase(tracing(), this); }

bool Tracer::active() { return !tracing().empty(); }

void Tracer::check_inactive(std::string_view call) {
  for (Tracer* tracer : tracing()) tracer->unheard(call);
}

void Tracer::announce_set(const Tensor& tensor) {
  for (Tracer* tracer : tracing()) tracer->before_set(tensor);
}

void Tracer::before_set(const Tensor& tensor) {
  fail<StateError>(
      "{}: set_ gives a tensor of shape {} other memory, which ops that run again would not; copy_ writes "
      "values",
      call_, tensor.shape());
}

void Tracer::unheard(std::string_view call) {
  fail<StateError>("{}: called inside a region or a capture, which cannot hear its ops; call it outside",
                   call);
}

std::uint32_t Tracer::find(const Storage& storage) const {
  const auto at = index_.find(storage.id());
  return at != index_.end() ? at->second : TracedTensor::none;
}

std::uint32_t Tracer::add(const Storage& storage) {
  const auto index = static_cast<std::uint32_t>(trace_.storages.size());
  TracedStorage& traced = trace_.storages.emplace_back();
  traced.id = storage.id();
  traced.device = storage.device();
  traced.bytes = storage.bytes();
  traced.version = storage.version();
  index_.emplace(traced.id, index);
  return index;
}

void Tracer::before_outside_write(const AnyOp&, const Tensor&) {}

void Tracer::check_version(const AnyOp& op, const Tensor& tensor) {
  const Ref<Storage> memory = memory_of(tensor);
  const std::uint32_t known = find(*memory);
  if (known == TracedTensor::none) return;
  const std::uint32_t version = trace_.storages[known].version;
  check<StateError>(
      memory->version() == version,
      "{}: an input of {} of shape {} was written past the ops, through a host pointer (version {}, now {}); "
      "write it before the call, or with an op",
      call_, op.name(), tensor.shape(), version, memory->version());
}

void Tracer::before_write(const AnyOp& op, Inputs in) {
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (!in[i].defined()) continue;
    check_version(op, in[i]);
    if (!op.writes(i) || !in[i].defined()) continue;
    const std::uint32_t known = find(*memory_of(in[i]));
    if (known == TracedTensor::none || trace_.storages[known].outside) before_outside_write(op, in[i]);
  }
}

TracedTensor Tracer::describe(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  const Ref<Storage> memory = memory_of(tensor);
  std::uint32_t storage = find(*memory);
  if (storage == TracedTensor::none) {
    storage = add(*memory);
    if (blank(*memory))
      trace_.storages[storage].maker = static_cast<std::uint32_t>(trace_.ops.size());
    else
      trace_.storages[storage].outside = memory;
  }
  return {storage, tensor.dtype(), tensor.layout()};
}

void Tracer::after(const AnyOp& op, Inputs in, Outputs out) {
  const auto index = static_cast<std::uint32_t>(trace_.ops.size());
  TracedOp traced{op.keep(), {}, {}, false, float32_matmul_precision(), Context::current().grad_enabled()};
  traced.place = Context::current().slot<Tape>().last_sequence();
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (!op.mutating() && in[i].defined()) check_version(op, in[i]);
    traced.in.push_back(describe(in[i]));
  }
  for (const Tensor& t : out) {
    if (const Ref<Storage> memory = memory_of(t); find(*memory) == TracedTensor::none)
      trace_.storages[add(*memory)].maker = index;
    traced.out.push_back(describe(t));
  }
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (!op.writes(i) || !in[i].defined()) continue;
    TracedStorage& storage = trace_.storages[traced.in[i].storage];
    storage.rewritten = true;
    storage.version = memory_of(in[i])->version();
  }
  trace_.ops.push_back(std::move(traced));
}

}  // namespace sherd
