#include "autograd/capture/capture.h"

#include <algorithm>
#include <unordered_set>

#include "autograd/trace.h"
#include "runtime/apply.h"
#include "runtime/reach.h"

namespace sherd {
namespace {

constexpr std::uint32_t none = TracedTensor::none;

bool same_layout(const Layout& a, const Layout& b) {
  return a.shape == b.shape && a.strides == b.strides && a.offset == b.offset;
}

std::string describe(const Spec& spec) {
  std::string text = fmt::format("{} {}", name_of(spec.dtype), spec.shape);
  return spec.device == Device::cpu() ? text : text + " on " + to_string(spec.device);
}

class CaptureTracer final : public Tracer {
 public:
  explicit CaptureTracer(const std::vector<Tensor>& inputs)
      : Tracer("capture"), random_(Context::current().generator().state()) {
    for (const Tensor& t : inputs) {
      check<ValueError>(t.defined(), "capture: input {} is an empty handle", inputs_.size());
      check<StateError>(find(t.storage()) == none,
                        "capture: two inputs share memory; pass the tensor once, or a clone");
      inputs_.push_back(add(t.storage()));
    }
  }

  void before_write(const AnyOp& op, Inputs in) override {
    check_random(op, "comes after random numbers that no op drew");
    Tracer::before_write(op, in);
  }
  void after(const AnyOp& op, Inputs in, Outputs out) override {
    check_random(op, "drew random numbers");
    const std::size_t known = trace_.storages.size();
    Tracer::after(op, in, out);
    for (std::size_t i = known; i < trace_.storages.size(); ++i)
      if (!trace_.storages[i].outside) alive_.insert(trace_.storages[i].id);
  }
  void made(const Tensor& tensor) override { born_.insert(tensor.storage().id()); }
  void host_read(const Tensor& tensor) override {
    fail<StateError>(
        "capture: the host reads a tensor of shape {}, and a replay could not react to its value; return it "
        "from the step "
        "and read it there",
        tensor.shape());
  }
  void storage_gone(std::uint64_t id) noexcept override {
    alive_.erase(id);
    born_.erase(id);
  }

  /// StateError for a tensor made by the step that is still alive and not among `outputs`.
  void check_alive(const std::vector<Tensor>& outputs) const {
    for (const TracedStorage& storage : trace_.storages) {
      if (!alive_.contains(storage.id)) continue;
      const bool output = std::any_of(outputs.begin(), outputs.end(),
                                      [&](const Tensor& t) { return t.storage().id() == storage.id; });
      const TracedOp& maker = trace_.ops[storage.maker];
      check<StateError>(output,
                        "capture: the result of {} of shape {} is still alive after the step and is not an "
                        "output, so a replay "
                        "could not renew it; run one step before capturing so that optimizer state exists, "
                        "call zero_grad at the end "
                        "of the step, or return the tensor",
                        maker.op->name(), maker.out[0].layout.shape);
    }
  }

  /// StateError for a tensor that the step writes and that a replay would find as the last one left it: one
  /// that the step made by no op, or that nothing outside holds any longer.
  void check_held(const std::vector<Tensor>& outputs) const {
    for (std::uint32_t i = 0; i < trace_.storages.size(); ++i) {
      const TracedStorage& storage = trace_.storages[i];
      if (!storage.outside || !storage.rewritten || std::ranges::count(inputs_, i) > 0) continue;
      check<StateError>(
          !born_.contains(storage.id),
          "capture: the step writes a tensor of {} bytes that it made of numbers or with empty, "
          "and a replay would not make it again; make it with zeros or full, or keep it outside "
          "the step",
          storage.bytes);
      const auto ours = 1 + std::ranges::count_if(
                                outputs, [&](const Tensor& t) { return t.storage_ref() == storage.outside; });
      check<StateError>(
          storage.outside->use_count() > static_cast<std::uint32_t>(ours),
          "capture: the step writes a tensor of {} bytes and then lets go of it, so a replay "
          "would go on from what the last one left; clear gradients before the capture, or keep "
          "the tensor outside the step",
          storage.bytes);
    }
  }

  /// StateError for memory that the host wrote: a replay would not.
  void check_untouched(const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs) const {
    const auto look = [&](const Storage& storage) {
      const std::uint32_t known = find(storage);
      check<StateError>(known == none || trace_.storages[known].version == storage.version(),
                        "capture: memory of {} bytes was written past the ops, through a host pointer or by "
                        "set_lr, and a replay would not repeat it; write it outside the step, or with an op",
                        storage.bytes());
    };
    for (const TracedStorage& storage : trace_.storages)
      if (storage.outside) look(*storage.outside);
    for (const auto* list : {&inputs, &outputs})
      for (const Tensor& t : *list) look(t.storage());
  }

  std::vector<std::uint32_t> inputs_;  // storages
  Trace take() { return std::move(trace_); }
  std::uint32_t index_of(const Storage& storage) const { return find(storage); }

 private:
  void check_random(const AnyOp& op, std::string_view what) const {
    check<NotImplementedError>(
        Context::current().generator().state() == random_,
        "capture: {} {}, and a replay would repeat them; draw them outside and pass them in", op.name(),
        what);
  }

  RandomKey random_;
  std::unordered_set<std::uint64_t> alive_;  // ids that ops of the trace made
  std::unordered_set<std::uint64_t> born_;   // ids that no op made, but the step did
};

}  // namespace

struct Program::Impl {
  /// Where the memory of a storage of the trace comes from during a replay.
  enum class Home { outside, input, workspace, output };
  struct Place {
    Home home = Home::workspace;
    std::uint32_t index = 0;             // of the input, or of the workspace buffer
    std::vector<std::uint32_t> tensors;  // values that lie in it
  };
  /// A tensor of the trace. Its handle is made once; each replay puts a storage behind it (`bind`).
  struct Value {
    std::uint32_t storage;
    std::int64_t offset;
    std::string name;
    Tensor tensor;
  };
  struct Step {
    Ref<const AnyOp> op;
    std::vector<std::uint32_t> in, out;  // values; none for an input that was not given
    Tensors bound_in, bound_out;         // the same as handles
  };
  struct Buffer {
    Device device;
    std::size_t bytes = 0;
    bool free = false;
    Ref<Storage> memory;
  };

  Impl(CaptureTracer& tracer, const std::vector<Tensor>& given, const std::vector<Tensor>& returned);
  std::vector<Tensor> replay(const std::vector<Tensor>& given);
  std::string text() const;

  Trace trace;
  std::vector<Place> places;  // by storage of the trace
  std::vector<Value> values;
  std::vector<Step> steps;
  std::vector<Buffer> workspace;
  std::vector<std::uint32_t> inputs, results;  // values
  std::vector<Tensor> first;                   // outputs of the captured run

 private:
  std::uint32_t value_of(const TracedTensor& t);
  void name_values();
  void plan();
  std::uint32_t take_buffer(const TracedStorage& storage);
  void check_inside(std::size_t i) const;
  void check_input(std::size_t i, const Tensor& given) const;
  void check_memory(const std::vector<Tensor>& given) const;
  void check_histories(const std::vector<Tensor>& given) const;
  void bind(std::uint32_t storage, const Ref<Storage>& memory, std::int64_t shift = 0);
  void bind_all(const std::vector<Tensor>& given);
  void unbind() noexcept;
  static void announce_writes(const Step& step);
  struct Bound;
};

std::uint32_t Program::Impl::value_of(const TracedTensor& t) {
  if (t.storage == none) return none;
  Place& place = places[t.storage];
  for (const std::uint32_t known : place.tensors) {
    const Tensor& tensor = values[known].tensor;
    if (tensor.dtype() == t.dtype && same_layout(tensor.layout(), t.layout)) return known;
  }
  const auto index = static_cast<std::uint32_t>(values.size());
  place.tensors.push_back(index);
  Tensor tensor(make_ref<TensorImpl>(trace.storages[t.storage].outside, t.layout, t.dtype));
  values.push_back({t.storage, t.layout.offset, {}, std::move(tensor)});
  return index;
}

Program::Impl::Impl(CaptureTracer& tracer, const std::vector<Tensor>& given,
                    const std::vector<Tensor>& returned)
    : first(returned) {
  std::vector<TracedTensor> ins, outs;
  for (std::size_t i = 0; i < given.size(); ++i)
    ins.push_back({tracer.inputs_[i], given[i].dtype(), given[i].layout()});
  for (const Tensor& t : returned) outs.push_back({tracer.index_of(t.storage()), t.dtype(), t.layout()});
  trace = tracer.take();
  for (std::size_t i = 0; i < outs.size(); ++i) {
    if (outs[i].storage != none) continue;  // no op of the step used it
    outs[i].storage = static_cast<std::uint32_t>(trace.storages.size());
    TracedStorage& storage = trace.storages.emplace_back();
    storage.device = returned[i].device();
    storage.outside = returned[i].storage_ref();
  }
  places.resize(trace.storages.size());
  for (std::size_t i = 0; i < places.size(); ++i)
    if (trace.storages[i].outside) places[i].home = Home::outside;
  for (std::uint32_t i = 0; i < ins.size(); ++i) {
    places[ins[i].storage].home = Home::input;
    places[ins[i].storage].index = i;
    inputs.push_back(value_of(ins[i]));
  }
  for (const TracedTensor& t : outs)
    if (places[t.storage].home == Home::workspace) places[t.storage].home = Home::output;
  for (const TracedOp& traced : trace.ops) {
    Step& step = steps.emplace_back();
    step.op = traced.op;
    for (const TracedTensor& t : traced.in) step.in.push_back(value_of(t));
    for (const TracedTensor& t : traced.out) step.out.push_back(value_of(t));
  }
  for (const TracedTensor& t : outs) results.push_back(value_of(t));
  for (std::size_t i = 0; i < inputs.size(); ++i) check_inside(i);
  for (Step& step : steps) {
    for (const std::uint32_t v : step.in) step.bound_in.push_back(v == none ? Tensor{} : values[v].tensor);
    for (const std::uint32_t v : step.out) step.bound_out.push_back(values[v].tensor);
  }
  name_values();
  plan();
}

void Program::Impl::name_values() {
  for (std::size_t i = 0; i < inputs.size(); ++i) values[inputs[i]].name = fmt::format("%x{}", i);
  int made = 0, outside = 0;
  const auto name = [&](std::uint32_t v, bool by_op) {
    if (v == none || !values[v].name.empty()) return;
    const bool met = !by_op && places[values[v].storage].home == Home::outside;
    values[v].name = met ? fmt::format("%p{}", outside++) : fmt::format("%{}", made++);
  };
  for (const Step& step : steps) {
    for (const std::uint32_t v : step.in) name(v, false);
    for (const std::uint32_t v : step.out) name(v, true);
  }
  for (const std::uint32_t v : results) name(v, false);
}

std::uint32_t Program::Impl::take_buffer(const TracedStorage& storage) {
  std::uint32_t best = none;
  const auto better = [&](std::size_t a, std::size_t b) {  // smallest that fits, else largest
    const bool a_fits = a >= storage.bytes, b_fits = b >= storage.bytes;
    return a_fits != b_fits ? a_fits : a_fits ? a < b : a > b;
  };
  for (std::uint32_t i = 0; i < workspace.size(); ++i) {
    if (!workspace[i].free || workspace[i].device != storage.device) continue;
    if (best == none || better(workspace[i].bytes, workspace[best].bytes)) best = i;
  }
  if (best == none) {
    best = static_cast<std::uint32_t>(workspace.size());
    workspace.push_back({storage.device, 0, false, {}});
  }
  workspace[best].bytes = std::max(workspace[best].bytes, storage.bytes);
  workspace[best].free = false;
  return best;
}

/// Assigns a workspace buffer to every storage between the ops, from the op that makes it to its last use.
void Program::Impl::plan() {
  std::vector<std::uint32_t> last(trace.storages.size(), none);
  for (std::uint32_t i = 0; i < trace.ops.size(); ++i)
    for (const auto* list : {&trace.ops[i].in, &trace.ops[i].out})
      for (const TracedTensor& t : *list)
        if (t.storage != none) last[t.storage] = i;
  for (std::uint32_t i = 0; i < trace.ops.size(); ++i) {
    const TracedOp& traced = trace.ops[i];
    for (const TracedTensor& t : traced.out) {
      Place& place = places[t.storage];
      if (place.home == Home::workspace && trace.storages[t.storage].maker == i)
        place.index = take_buffer(trace.storages[t.storage]);
    }
    // After the outputs have their buffers, so that no op writes where it still reads.
    for (const auto* list : {&traced.in, &traced.out})
      for (const TracedTensor& t : *list)
        if (t.storage != none && last[t.storage] == i && places[t.storage].home == Home::workspace)
          workspace[places[t.storage].index].free = true;
  }
}

/// StateError where the step uses memory of input `i`'s storage that lies outside the input.
void Program::Impl::check_inside(std::size_t i) const {
  const auto bytes = [&](std::uint32_t v) -> std::pair<std::int64_t, std::int64_t> {
    const Tensor& t = values[v].tensor;
    if (t.numel() == 0) return {};
    const Reach reach = *Reach::of(t.layout());
    return {reach.low * size_of(t.dtype()), (reach.high + 1) * size_of(t.dtype())};
  };
  const auto [low, high] = bytes(inputs[i]);
  for (const std::uint32_t v : places[values[inputs[i]].storage].tensors) {
    const auto [from, to] = bytes(v);
    check<StateError>(
        from == to || (from >= low && to <= high),
        "capture: the step uses memory beside input {}, which another input would not have; pass "
        "the whole tensor as the input, or a clone",
        i);
  }
}

void Program::Impl::check_input(std::size_t i, const Tensor& given) const {
  check<ValueError>(given.defined(), "replay: input {} is an empty handle", i);
  const Value& value = values[inputs[i]];
  const Layout& layout = value.tensor.layout();
  const Device device = trace.storages[value.storage].device;
  check<ShapeError>(given.shape() == layout.shape,
                    "replay: input {} has shape {}, the program was captured with {}; capture again for "
                    "another shape",
                    i, given.shape(), layout.shape);
  check<DTypeError>(given.dtype() == value.tensor.dtype(),
                    "replay: input {} is {}, the program was captured with {}", i, name_of(given.dtype()),
                    name_of(value.tensor.dtype()));
  check<DeviceError>(given.device() == device, "replay: input {} is on {}, the program was captured on {}", i,
                     to_string(given.device()), to_string(device));
  bool same_strides = true;  // where they are used
  for (int d = 0; d < layout.shape.rank(); ++d)
    same_strides = same_strides && (layout.shape[d] <= 1 || given.strides()[d] == layout.strides[d]);
  check<ShapeError>(same_strides || given.numel() == 0,
                    "replay: input {} has strides {}, the program was captured with {}; pass a "
                    "contiguous copy to both",
                    i, given.strides(), layout.strides);
}

/// The program's ops were checked for overlap with the memory that it was captured with.
void Program::Impl::check_memory(const std::vector<Tensor>& given) const {
  const auto writes = [&](std::size_t i) { return trace.storages[values[inputs[i]].storage].rewritten; };
  for (std::size_t i = 0; i < given.size(); ++i) {
    const bool written = writes(i);
    for (std::size_t j = 0; j < i; ++j)
      check<StateError>(given[i].storage_ref() != given[j].storage_ref() || !(written || writes(j)),
                        "replay: inputs {} and {} share memory, and one of them is written; pass a clone", j,
                        i);
    for (std::size_t k = 0; k < places.size(); ++k)
      check<StateError>(
          places[k].home != Home::outside || trace.storages[k].outside != given[i].storage_ref() ||
              !(written || trace.storages[k].rewritten),
          "replay: input {} shares memory with a tensor that the program uses, and one of them is "
          "written; pass a clone",
          i);
  }
}

/// StateError for a write into memory of a tensor with history, because the tape does not see a replay.
void Program::Impl::check_histories(const std::vector<Tensor>& given) const {
  if (!Context::current().grad_enabled()) return;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const bool from_input = places[i].home == Home::input;
    if (!trace.storages[i].rewritten || (!from_input && places[i].home != Home::outside)) continue;
    const Tensor& tensor = from_input ? given[places[i].index] : values[places[i].tensors.front()].tensor;
    check<StateError>(tensor.storage().histories() == 0,
                      "replay: the program writes a tensor of shape {} that was computed with gradients "
                      "recorded; replay under NoGrad, or with a clone",
                      tensor.shape());
  }
}

void Program::Impl::bind(std::uint32_t storage, const Ref<Storage>& memory, std::int64_t shift) {
  for (const std::uint32_t v : places[storage].tensors) {
    TensorImpl& impl = *values[v].tensor.impl();
    impl.storage = memory;
    impl.layout.offset = values[v].offset + shift;
  }
}

void Program::Impl::bind_all(const std::vector<Tensor>& given) {
  for (Buffer& buffer : workspace)
    if (!buffer.memory) buffer.memory = Storage::allocate(buffer.device, buffer.bytes);
  for (std::uint32_t i = 0; i < places.size(); ++i) {
    const Place& place = places[i];
    if (place.home == Home::workspace) {
      bind(i, workspace[place.index].memory);
    } else if (place.home == Home::output) {
      bind(i, Storage::allocate(trace.storages[i].device, trace.storages[i].bytes));
    } else if (place.home == Home::input) {
      const Tensor& input = given[place.index];
      bind(i, input.storage_ref(), input.layout().offset - values[inputs[place.index]].offset);
    }
  }
}

/// Drops inputs and outputs after a replay; between replays the program holds its workspace alone.
void Program::Impl::unbind() noexcept {
  for (std::uint32_t i = 0; i < places.size(); ++i)
    if (places[i].home == Home::input || places[i].home == Home::output) bind(i, {});
}

struct Program::Impl::Bound {
  explicit Bound(Impl& impl) : impl(impl) {}
  ~Bound() { impl.unbind(); }
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;
  Impl& impl;
};

/// Counts the writes of an op, before it runs: one that throws halfway has written too.
void Program::Impl::announce_writes(const Step& step) {
  for (std::size_t i = 0; i < step.bound_in.size(); ++i) {
    if (!step.op->writes(i)) continue;
    Storage& storage = step.bound_in[i].storage();
    if (storage.owned()) storage.owner()->before_write(storage);
    storage.bump_version();
  }
}

std::vector<Tensor> Program::Impl::replay(const std::vector<Tensor>& given) {
  Tracer::check_inactive("replay");
  check<ValueError>(given.size() == inputs.size(),
                    "replay: {} inputs given, the program was captured with {}", given.size(), inputs.size());
  for (std::size_t i = 0; i < given.size(); ++i) check_input(i, given[i]);
  check_memory(given);
  check_histories(given);
  const NoGrad no_grad;
  const Bound bound(*this);
  bind_all(given);
  for (Step& step : steps) {
    if (step.op->is_view()) continue;
    if (step.op->mutating()) announce_writes(step);
    run_again(*step.op, step.bound_in, step.bound_out);
  }
  std::vector<Tensor> outputs;
  for (const std::uint32_t v : results) outputs.push_back(values[v].tensor.detach());
  return outputs;
}

std::string Program::Impl::text() const {
  const auto spec = [&](std::uint32_t v) {
    const Tensor& t = values[v].tensor;
    return describe({t.shape(), t.dtype(), trace.storages[values[v].storage].device});
  };
  const auto list = [&](const auto& ids, auto&& print) {
    std::string text;
    for (const std::uint32_t v : ids) text += (text.empty() ? "" : ", ") + print(v);
    return text;
  };
  const auto name = [&](std::uint32_t v) { return v == none ? std::string("none") : values[v].name; };
  const auto declare = [&](std::uint32_t v) { return name(v) + " : " + spec(v); };
  std::string text = "inputs " + list(inputs, declare) + "\n";
  std::vector<std::string> outside;
  for (std::uint32_t v = 0; v < values.size(); ++v) {
    if (!values[v].name.starts_with("%p")) continue;
    std::string line = "outside " + declare(v);
    // Another view of memory that was named before.
    const std::uint32_t base = places[values[v].storage].tensors.front();
    if (base != v) line += ", in " + name(base);
    outside.push_back(std::move(line));
  }
  for (const std::string& line : outside) text += line + "\n";
  for (const Step& step : steps)
    text += fmt::format("{} = {}({}) : {}\n", list(step.out, name), step.op->text(), list(step.in, name),
                        list(step.out, spec));
  return text + "return " + list(results, name) + "\n";
}

Program::Program(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Program::Program(Program&&) noexcept = default;
Program& Program::operator=(Program&&) noexcept = default;
Program::~Program() = default;

Program::Impl& Program::impl() const {
  check<StateError>(impl_ != nullptr, "Program: it was moved from");
  return *impl_;
}

std::vector<Tensor> Program::replay(const std::vector<Tensor>& inputs) { return impl().replay(inputs); }
const std::vector<Tensor>& Program::outputs() const { return impl().first; }
std::size_t Program::size() const { return impl().steps.size(); }
std::size_t Program::workspace_bytes() const {
  std::size_t bytes = 0;
  for (const Impl::Buffer& buffer : impl().workspace) bytes += buffer.bytes;
  return bytes;
}

Program capture(const Step& step, const std::vector<Tensor>& inputs) {
  CaptureTracer tracer(inputs);
  const Listening listening(tracer);
  std::vector<Tensor> outputs;
  for (const Tensor& t : step(inputs)) {
    check<ValueError>(t.defined(), "capture: output {} of the step is an empty handle", outputs.size());
    outputs.push_back(t.detach());
  }
  tracer.check_alive(outputs);
  tracer.check_held(outputs);
  tracer.check_untouched(inputs, outputs);
  return Program(std::make_unique<Program::Impl>(tracer, inputs, outputs));
}

std::string to_string(const Program& program) { return program.impl().text(); }

}  // namespace sherd
