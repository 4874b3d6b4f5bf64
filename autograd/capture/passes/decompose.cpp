#include "autograd/capture/passes/decompose.h"

#include <algorithm>
#include <unordered_set>

#include "autograd/capture/passes/rewrite.h"
#include "autograd/capture/tracer.h"
#include "runtime/ops.h"
#include "runtime/ops/list.h"

namespace sherd {
namespace {

bool is_primitive(const AnyOp& op) {
  static const std::unordered_set<const KernelRow*> rows = [] {
    std::unordered_set<const KernelRow*> found;
    ops::Primitives::for_each([&]<class O>() { found.insert(&kernel_row<O>()); });
    return found;
  }();
  return rows.contains(&op.kernels());
}

/// A scope in which who listened hears nothing, nothing is recorded, and after which random numbers go on as
/// if nothing had been.
class Unheard {
 public:
  Unheard() : listeners_(context_.listeners()), random_(context_.generator().state()) {
    for (Listener* listener : listeners_) context_.remove_listener(*listener);
  }
  ~Unheard() {
    for (Listener* listener : listeners_) context_.add_listener(*listener);
    context_.generator().set_state(random_);
  }
  Unheard(const Unheard&) = delete;
  Unheard& operator=(const Unheard&) = delete;

 private:
  Context& context_ = Context::current();
  std::vector<Listener*> listeners_;
  RandomKey random_;
  NoGrad no_grad_;
};

/// Zeros in place of an op's tensors, which share memory as these do.
class StandIns {
 public:
  StandIns(const Trace& trace, const TracedOp& traced) : trace_(trace) {
    for (const TracedTensor& t : traced.in) in_.push_back(make(t));
    for (const TracedTensor& t : traced.out) out_.push_back(make(t));
  }
  Inputs in() const { return in_; }
  Outputs out() { return out_; }
  /// Those that are there, and the storage of each in the trace.
  std::vector<Tensor> given;
  std::vector<std::uint32_t> storages;

 private:
  Tensor make(const TracedTensor& t) {
    if (t.storage == TracedTensor::none) return {};
    const TracedStorage& storage = trace_.storages[t.storage];
    const auto known = static_cast<std::size_t>(std::ranges::find(storages, t.storage) - storages.begin());
    const Ref<Storage> memory =
        known < storages.size()
            ? given[known].storage_ref()
            : zeros({static_cast<std::int64_t>(storage.bytes)}, {DType::u8, storage.device}).storage_ref();
    storages.push_back(t.storage);
    return given.emplace_back(make_ref<TensorImpl>(memory, t.layout, t.dtype));
  }
  const Trace& trace_;
  std::vector<Tensor> in_, out_;
};

class Decomposing {
 public:
  explicit Decomposing(Recorded program) : program_(std::move(program)) {}
  Recorded run() {
    std::vector<std::size_t> place;
    const std::vector<TracedOp> whole = std::exchange(program_.trace.ops, {});
    for (const TracedOp& traced : whole) {
      place.push_back(parts_.size());
      put(traced);
    }
    place.push_back(parts_.size());
    replace_ops(program_, std::move(parts_), place);
    return std::move(program_);
  }

 private:
  /// Appends the op, or what it comes down to.
  void put(const TracedOp& traced) {
    const bool whole =
        traced.op->is_view() || traced.op->call_among_ranks() != nullptr || is_primitive(*traced.op);
    const std::optional<std::vector<TracedOp>> form = whole ? std::nullopt : form_of(traced);
    if (!form) return parts_.push_back(traced);
    for (const TracedOp& part : *form) put(part);
  }

  /// The op's reference on the program's storages; none where it has none, or one that is no program.
  std::optional<std::vector<TracedOp>> form_of(const TracedOp& traced) {
    const Unheard unheard;
    const Float32MatmulPrecisionScope precision(traced.precision);
    StandIns stand_ins(program_.trace, traced);
    Recorded form;
    std::vector<std::uint32_t> found;  // of `stand_ins.given`, in the form's trace
    try {
      CaptureTracer tracer("decompose", stand_ins.given, Sharing::allowed);
      {
        const Listening listening(tracer);
        if (!traced.op->run_reference(stand_ins.in(), stand_ins.out())) return {};
      }
      tracer.check_constants();
      tracer.check_drawn();
      found = tracer.inputs();
      form = tracer.take(stand_ins.given, {});
    } catch (const Error&) {
      return {};
    }
    const auto calls = [](const TracedOp& part) { return part.op->call_among_ranks() != nullptr; };
    if (std::ranges::any_of(form.trace.ops, calls)) return {};
    const auto before = static_cast<std::uint32_t>(program_.trace.storages.size());
    adopt_storages(form.trace, found, stand_ins.storages);
    if (!traced.op->mutating())
      for (std::size_t k = traced.out.size(); k-- > 0;) adopt_result(form.trace.ops, traced, k, before);
    return std::move(form.trace.ops);
  }

  /// Numbers the form's tensors by the program's storages, to which those that it makes come.
  void adopt_storages(Trace& form, const std::vector<std::uint32_t>& found,
                      const std::vector<std::uint32_t>& given) {
    std::vector<std::uint32_t> number(form.storages.size(), TracedTensor::none);
    for (std::size_t i = 0; i < found.size(); ++i) number[found[i]] = given[i];
    for (std::size_t s = 0; s < number.size(); ++s) {
      if (number[s] != TracedTensor::none) continue;
      number[s] = static_cast<std::uint32_t>(program_.trace.storages.size());
      program_.trace.storages.push_back(form.storages[s]);
    }
    for (TracedOp& part : form.ops)
      each_tensor_of(part, [&](TracedTensor& t) { t.storage = number[t.storage]; });
  }

  /// Lets result `k` be made where it is to be, instead of being copied there, if the form, whose storages
  /// come after `before`, made it so.
  void adopt_result(std::vector<TracedOp>& form, const TracedOp& traced, std::size_t k,
                    std::uint32_t before) {
    const TracedTensor& out = traced.out[k];
    const auto writes_it = [&](const TracedOp& part) {
      return &part.op->kernels() == &kernel_row<ops::CopyInto>() && same_value(part.in[0], out);
    };
    const auto copy = std::ranges::find_if(form, writes_it);
    if (copy == form.end()) return;
    const TracedTensor from = copy->in[1];
    const std::vector<TracedStorage>& storages = program_.trace.storages;
    if (from.storage < before || storages[from.storage].outside || !same_value(from, on(from.storage, out)) ||
        storages[from.storage].bytes != storages[out.storage].bytes)
      return;
    form.erase(copy);
    for (TracedOp& part : form)
      each_tensor_of(part, [&](TracedTensor& t) {
        if (t.storage == from.storage) t.storage = out.storage;
      });
  }
  static TracedTensor on(std::uint32_t storage, TracedTensor t) {
    t.storage = storage;
    return t;
  }

  Recorded program_;
  std::vector<TracedOp> parts_;
};

}  // namespace

Recorded decompose(Recorded program) { return Decomposing(std::move(program)).run(); }

}  // namespace sherd
