#include "autograd/capture/tracer.h"

#include <algorithm>

#include "autograd/capture/capture.h"
#include "autograd/capture/effects.h"
#include "runtime/context.h"
#include "runtime/lent_call.h"

namespace sherd {
namespace {

/// The captures of a rank that are under way, one within the other.
struct Captures {
  std::vector<CaptureTracer*> tracers;
};

std::vector<CaptureTracer*>& captures() { return Context::current().slot<Captures>().tracers; }

void tell_frames(const Effect& effect) {
  Effect in_mode = effect;
  in_mode.again = [again = effect.again, recorded = Context::current().grad_enabled()] {
    const GradMode mode(recorded);
    again();
  };
  for (CaptureTracer* tracer : captures())
    if (!tracer->keeps_calls()) tracer->repeat(in_mode);
}

}  // namespace

bool capturing() { return !captures().empty(); }

bool capturing_calls() { return std::ranges::any_of(captures(), &CaptureTracer::keeps_calls); }

void repeat_in_replays(const std::function<void()>& again) {
  for (CaptureTracer* tracer : captures()) tracer->repeat({0, again});
}

void repeat_in_frames(std::string name, const std::function<void()>& again) {
  tell_frames({0, again, std::move(name)});
}
void begin_in_frames(std::string name, const std::function<void()>& again,
                     const std::function<void()>& undo) {
  tell_frames({0, again, std::move(name), Bracket::begins, undo});
}
void end_in_frames(std::string name, const std::function<void()>& again) {
  tell_frames({0, again, std::move(name), Bracket::ends});
}

void refuse_in_frames(const std::string& why) {
  for (CaptureTracer* tracer : captures()) tracer->refuse(why);
}

std::uint64_t begin_of_frame() {
  std::uint64_t begin = 0;
  for (const CaptureTracer* tracer : captures()) begin = std::max(begin, tracer->since());
  return begin;
}

void tell_captures(const AnyOp& op, Inputs in, Outputs out) {
  for (CaptureTracer* tracer : captures()) tracer->after(op, in, out);
}

CaptureTracer::CaptureTracer(std::string call, const std::vector<Tensor>& inputs, Sharing sharing)
    : Tracer(std::move(call)), begin_(Context::current().generator().state()), seen_(begin_) {
  for (const Tensor& t : inputs) {
    check<ValueError>(t.defined(), "{}: input {} is an empty handle", call_, inputs_.size());
    const std::uint32_t known = find(t.storage());
    check<StateError>(known == TracedTensor::none || sharing == Sharing::allowed,
                      "{}: two inputs share memory; pass the tensor once, or a clone", call_);
    inputs_.push_back(known == TracedTensor::none ? add(t.storage()) : known);
  }
  captures().push_back(this);
}

CaptureTracer::~CaptureTracer() { captures().pop_back(); }

Recorded CaptureTracer::take(const std::vector<Tensor>& given, const std::vector<Tensor>& returned) {
  Recorded recorded{{}, std::move(effects_), {}, {}, begin_, seen_};
  for (std::size_t i = 0; i < given.size(); ++i)
    recorded.inputs.push_back({inputs_[i], given[i].dtype(), given[i].layout()});
  for (const Tensor& t : returned) recorded.outputs.push_back({find(t.storage()), t.dtype(), t.layout()});
  recorded.trace = std::move(trace_);
  for (std::size_t i = 0; i < returned.size(); ++i) {
    if (recorded.outputs[i].storage != TracedTensor::none) continue;  // no op of the step used it
    std::vector<TracedStorage>& storages = recorded.trace.storages;
    recorded.outputs[i].storage = static_cast<std::uint32_t>(storages.size());
    TracedStorage& storage = storages.emplace_back();
    storage.device = returned[i].device();
    storage.outside = returned[i].storage_ref();
  }
  return recorded;
}

Ref<Storage> CaptureTracer::memory_of(const Tensor& tensor) {
  if (tensor.storage().owned())
    if (Ref<Storage> provider = tensor.storage().provider();
        provider && find(*provider) != TracedTensor::none) {
      provided_.insert(provider->id());
      return provider;
    }
  return tensor.storage_ref();
}

/// Memory that the host wrote first has values that the program keeps.
void CaptureTracer::before_write(const AnyOp& op, Inputs in) {
  for (const Tensor& t : in)
    if (t.defined() && t.storage().version() > 0 && blank_.erase(t.storage().id()) > 0)
      born_.insert(t.storage().id());
  Tracer::before_write(op, in);
}

/// StateError for reading memory that nothing wrote: the values came there past the ops.
void CaptureTracer::look_at_content(const AnyOp& op, Inputs in) {
  for (std::size_t i = 0; i < in.size() && !blank_.empty(); ++i) {
    if (!in[i].defined() || op.is_view() || op.writes(i) || in[i].numel() == 0) continue;
    const Storage& storage = in[i].storage();
    if (!blank_.contains(storage.id())) continue;
    check<StateError>(storage.version() > 0 && find(storage) == TracedTensor::none,
                      "{}: {} reads a tensor of shape {} that the step made with empty and no op wrote, "
                      "so a replay could not fill it; fill it with an op, or outside the step",
                      call_, op.name(), in[i].shape());
    blank_.erase(storage.id());
    born_.insert(storage.id());
  }
}

void CaptureTracer::after(const AnyOp& op, Inputs in, Outputs out) {
  look_at_content(op, in);
  look_at_generator();
  if (const RandomKey* key = op.random_key()) std::erase(unclaimed_, *key);
  const std::size_t known = trace_.storages.size();
  Tracer::after(op, in, out);
  if (const CallAmongRanks* const call = op.call_among_ranks())
    if (std::shared_ptr<LentCall> lent = call->lent()) lent_.push_back(std::move(lent));
  for (std::size_t i = known; i < trace_.storages.size(); ++i)
    if (!trace_.storages[i].outside) alive_.insert(trace_.storages[i].id);
  if (!blank_.empty() && op.mutating())
    for (std::size_t i = 0; i < in.size(); ++i)
      if (op.writes(i) && in[i].defined()) blank_.erase(in[i].storage().id());
}

void CaptureTracer::host_read(const Tensor& tensor) {
  fail<StateError>(
      "{}: the host reads a tensor of shape {}, and a replay could not react to its value; return it "
      "from the step "
      "and read it there",
      call_, tensor.shape());
}

void CaptureTracer::storage_gone(std::uint64_t id) noexcept {
  alive_.erase(id);
  born_.erase(id);
  blank_.erase(id);
  provided_.erase(id);
}

void CaptureTracer::wait_for_peers() {
  for (const auto& call : lent_) call->wait();
  lent_.clear();
}

void CaptureTracer::check_alive(const std::vector<Tensor>& outputs) const {
  for (const TracedStorage& storage : trace_.storages) {
    if (!alive_.contains(storage.id) || provided_.contains(storage.id)) continue;
    const bool output = std::any_of(outputs.begin(), outputs.end(),
                                    [&](const Tensor& t) { return t.storage().id() == storage.id; });
    const TracedOp& maker = trace_.ops[storage.maker];
    check<StateError>(output,
                      "{}: the result of {} of shape {} is still alive after the step and is not an "
                      "output, so a replay "
                      "could not renew it; run one step before capturing so that optimizer state exists, "
                      "call zero_grad at the end "
                      "of the step, or return the tensor",
                      call_, maker.op->name(), maker.out[0].layout.shape);
  }
}

void CaptureTracer::check_constants() const {
  for (std::uint32_t i = 0; i < trace_.storages.size(); ++i) {
    const TracedStorage& storage = trace_.storages[i];
    if (!storage.outside || std::ranges::count(inputs_, i) > 0) continue;
    check<StateError>(!storage.rewritten || !born_.contains(storage.id),
                      "{}: the step writes a tensor of {} bytes that it made of the host's values, and a "
                      "replay would not make it again; make it with an op such as zeros or full, or keep it "
                      "outside the step",
                      call_, storage.bytes);
  }
}

void CaptureTracer::check_held(const std::vector<Tensor>& outputs) const {
  check_constants();
  for (std::uint32_t i = 0; i < trace_.storages.size(); ++i) {
    const TracedStorage& storage = trace_.storages[i];
    if (!storage.outside || std::ranges::count(inputs_, i) > 0) continue;
    const auto ours = 1 + std::ranges::count_if(
                              outputs, [&](const Tensor& t) { return t.storage_ref() == storage.outside; });
    if (storage.outside->use_count() > static_cast<std::uint32_t>(ours)) continue;
    check<StateError>(!storage.rewritten,
                      "{}: the step writes a tensor of {} bytes and then lets go of it, so a replay "
                      "would go on from what the last one left; clear gradients before the capture, or keep "
                      "the tensor outside the step",
                      call_, storage.bytes);
    check<StateError>(
        born_.contains(storage.id),
        "{}: the step reads a tensor of {} bytes from before it and then lets go of it, so "
        "every replay would read the same values again; clear gradients before the capture, also "
        "those that backwards without communication left, or keep the tensor outside the step",
        call_, storage.bytes);
  }
}

void CaptureTracer::check_untouched(const std::vector<Tensor>& inputs,
                                    const std::vector<Tensor>& outputs) const {
  const auto look = [&](const Storage& storage) {
    const std::uint32_t known = find(storage);
    check<StateError>(known == TracedTensor::none || trace_.storages[known].version == storage.version(),
                      "{}: memory of {} bytes was written past the ops, through a host pointer or by "
                      "set_lr, and a replay would not repeat it; write it outside the step, or with an op",
                      call_, storage.bytes());
  };
  for (const TracedStorage& storage : trace_.storages)
    if (storage.outside) look(*storage.outside);
  for (const auto* list : {&inputs, &outputs})
    for (const Tensor& t : *list) look(t.storage());
}

/// Notes what was drawn since the last look.
void CaptureTracer::look_at_generator() {
  const RandomKey now = Context::current().generator().state();
  if (now == seen_) return;
  check<StateError>(now.seed == seen_.seed && now.offset > seen_.offset,
                    "{}: the step seeds the generator, and a replay would not; seed before the step", call_);
  unclaimed_.push_back(seen_);
  seen_ = now;
}

void CaptureTracer::check_drawn() {
  look_at_generator();
  check<StateError>(unclaimed_.empty(),
                    "{}: the host drew random numbers, and a replay would use the same again; draw them "
                    "with an op, or outside and pass them in",
                    call_);
}

}  // namespace sherd
