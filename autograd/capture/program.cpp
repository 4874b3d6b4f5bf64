#include "autograd/capture/program.h"

#include <algorithm>

#include "autograd/capture/resident.h"
#include "autograd/tape.h"
#include "runtime/apply.h"
#include "runtime/bytes_taken.h"
#include "runtime/reach.h"

namespace sherd {
namespace {

constexpr std::size_t buffer_alignment = 512;  // as memory of any device has; some kernels look at it

bool same_layout(const Layout& a, const Layout& b) {
  return a.shape == b.shape && a.strides == b.strides && a.offset == b.offset;
}

/// Whether a tensor has all elements between its first and its last one.
bool has_all_between(const Layout& layout) {
  const Reach reach = *Reach::of(layout);
  std::int64_t count = 1;
  for (int i = 0; i < layout.shape.rank(); ++i) count *= layout.strides[i] == 0 ? 1 : layout.shape[i];
  return count == reach.high - reach.low + 1;
}

/// `at(place)` for each element's place in its storage. The tensor has elements.
template <class F>
void each_place(const Layout& layout, int axis, std::int64_t place, const F& at) {
  if (axis == layout.shape.rank()) return at(place);
  for (std::int64_t i = 0; i < layout.shape[axis]; ++i)
    each_place(layout, axis + 1, place + i * layout.strides[axis], at);
}

/// Whether all elements of `part` are elements of `whole`, between whose first and last one they lie.
bool is_part_of(const Layout& part, const Layout& whole) {
  if (same_layout(part, whole) || has_all_between(whole)) return true;
  const Reach reach = *Reach::of(whole);
  std::vector<bool> there(static_cast<std::size_t>(reach.high - reach.low + 1));
  const auto of = [&](std::int64_t place) { return there[static_cast<std::size_t>(place - reach.low)]; };
  each_place(whole, 0, whole.offset, [&](std::int64_t place) { of(place) = true; });
  bool all = true;
  each_place(part, 0, part.offset, [&](std::int64_t place) { all = all && of(place); });
  return all;
}

std::string describe(const Spec& spec) {
  std::string text = fmt::format("{} {}", name_of(spec.dtype), spec.shape);
  return spec.device == Device::cpu() ? text : text + " on " + to_string(spec.device);
}

}  // namespace

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

Program::Impl::Impl(Recorded recorded, std::vector<Tensor> returned)
    : trace(std::move(recorded.trace)),
      first(std::move(returned)),
      random{recorded.random_begin, recorded.random_end.offset},
      cut(std::move(recorded.cut)) {
  const std::vector<TracedTensor>&ins = recorded.inputs, &outs = recorded.outputs;
  places.resize(trace.storages.size());
  for (std::size_t i = 0; i < places.size(); ++i)
    if (trace.storages[i].outside) places[i].home = Home::outside;
  if (cut)
    for (const auto& [storage, number] : cut->kept) {
      trace.storages[storage].outside = {};  // each run is handed its own
      places[storage] = {Home::kept, number, {}};
    }
  for (std::uint32_t i = 0; i < ins.size(); ++i) {
    Place& place = places[ins[i].storage];
    if (place.home != Home::input) place = {Home::input, i, std::move(place.tensors)};
    inputs.push_back(value_of(ins[i]));
  }
  if (cut)
    for (const auto& [storage, number] : cut->made)
      if (places[storage].home == Home::workspace) places[storage].home = Home::output;
  for (const TracedTensor& t : outs)
    if (places[t.storage].home == Home::workspace) places[t.storage].home = Home::output;
  for (const TracedOp& traced : trace.ops) {
    Step& step = steps.emplace_back();
    step.op = traced.op;
    step.precision = traced.precision;
    step.recorded = traced.recorded;
    step.place = traced.place;
    for (const TracedTensor& t : traced.in) step.in.push_back(value_of(t));
    for (const TracedTensor& t : traced.out) step.out.push_back(value_of(t));
  }
  for (Effect& effect : recorded.effects)
    (effect.before < steps.size() ? steps[effect.before].effects : last_effects).push_back(std::move(effect));
  for (const TracedTensor& t : outs) results.push_back(value_of(t));
  for (std::size_t i = 0; i < inputs.size(); ++i) check_inside(i);
  for (Step& step : steps) {
    for (const std::uint32_t v : step.in) step.bound_in.push_back(v == none ? Tensor{} : values[v].tensor);
    for (const std::uint32_t v : step.out) step.bound_out.push_back(values[v].tensor);
  }
  name_values();
  plan();
  if (cut) plan_half();
}

/// When a half takes memory for what leaves it, lets go of what it was handed, and has owners bring theirs.
void Program::Impl::plan_half() {
  std::vector<std::uint32_t>& last = last_use_;
  last.assign(places.size(), none);
  for (std::uint32_t i = 0; i < steps.size(); ++i) {
    for (const auto* list : {&trace.ops[i].in, &trace.ops[i].out})
      for (const TracedTensor& t : *list) {
        if (t.storage == none) continue;
        last[t.storage] = i;
        std::vector<std::uint32_t>& brings = steps[i].brings;
        if (places[t.storage].home == Home::outside && is_brought(*trace.storages[t.storage].outside) &&
            std::ranges::find(brings, t.storage) == brings.end())
          brings.push_back(t.storage);
      }
    for (const TracedTensor& t : trace.ops[i].out)
      if (places[t.storage].home == Home::output && trace.storages[t.storage].maker == i)
        steps[i].makes.push_back(t.storage);
  }
  for (std::uint32_t s = 0; s < places.size(); ++s)
    if (last[s] != none && places[s].home == Home::kept) steps[last[s]].frees.push_back(s);
}

std::int64_t Program::Impl::workspace_bytes() const {
  std::size_t bytes = 0;
  for (const Workspace& workspace : workspaces)
    bytes += bytes_taken(workspace.device, workspace.packing.bytes);
  return static_cast<std::int64_t>(bytes);
}

std::vector<std::uint32_t> Program::Impl::kept_inputs() const {
  std::vector<std::uint32_t> numbers;
  for (const auto& [storage, number] : cut->made)
    if (places[storage].home == Home::input) numbers.push_back(number);
  return numbers;
}

std::int64_t Program::Impl::held_bytes(std::span<const std::uint32_t> but,
                                       std::span<const Rounding> roundings) const {
  const auto bytes = [this](std::uint32_t s) {
    return static_cast<std::int64_t>(bytes_taken(trace.storages[s].device, trace.storages[s].bytes));
  };
  const auto counts = [&](std::uint32_t s) {
    return places[s].home != Home::kept || std::ranges::find(but, places[s].index) == but.end();
  };
  std::int64_t now = 0;
  for (const auto& [storage, number] : cut->kept)
    if (last_use_[storage] != none && counts(storage)) now += bytes(storage);
  std::int64_t most = now;
  for (const Step& step : steps) {
    for (const std::uint32_t s : step.makes) now += bytes(s);
    most = std::max(most, now);
    for (const std::uint32_t s : step.frees) now -= counts(s) ? bytes(s) : 0;
  }
  for (const Rounding& r : roundings) {
    most = std::max(most, now + r.rounded);
    now += r.rounded - r.wide;
  }
  return most;
}

void Program::Impl::name_values() {
  for (std::size_t i = 0; i < inputs.size(); ++i) values[inputs[i]].name = fmt::format("%x{}", i);
  int made = 0, outside = 0;
  const auto name = [&](std::uint32_t v, bool by_op) {
    if (v == none || !values[v].name.empty()) return;
    const Place& place = places[values[v].storage];
    if (place.home == Home::kept && place.tensors.front() == v) {
      values[v].name = fmt::format("%k{}", place.index);
      return;
    }
    const bool met = !by_op && places[values[v].storage].home == Home::outside;
    values[v].name = met ? fmt::format("%p{}", outside++) : fmt::format("%{}", made++);
  };
  for (const Step& step : steps) {
    for (const std::uint32_t v : step.in) name(v, false);
    for (const std::uint32_t v : step.out) name(v, true);
  }
  for (const std::uint32_t v : results) name(v, false);
}

/// Gives every storage between the ops a buffer, from the op that makes it to its last use; what a call's
/// peers read lives on until the next call of that line: who took the memory at once would wait for the
/// peers, where the step had other memory and went on.
void Program::Impl::plan() {
  std::vector<std::uint32_t> last(trace.storages.size(), none), last_write(trace.storages.size(), 0);
  std::vector<const void*> line(trace.storages.size(), nullptr);  // of the last call that reads it
  std::vector<std::pair<const void*, std::uint32_t>> lent;        // buffers that nobody uses but a line
  for (std::uint32_t i = 0; i < trace.ops.size(); ++i) {
    const TracedOp& traced = trace.ops[i];
    for (const auto* list : {&traced.in, &traced.out})
      for (const TracedTensor& t : *list)
        if (t.storage != none && (!traced.op->is_view() || last[t.storage] == none)) last[t.storage] = i;
    for (std::size_t k = 0; k < traced.in.size(); ++k)
      if (traced.op->writes(k) && traced.in[k].storage != none) last_write[traced.in[k].storage] = i;
  }
  const auto end = static_cast<std::uint32_t>(trace.ops.size());
  for (std::uint32_t i = 0; i < end; ++i) {
    const TracedOp& traced = trace.ops[i];
    for (const auto* list : {&traced.in, &traced.out})
      for (const TracedTensor& t : *list) {
        if (t.storage == none || trace.storages[t.storage].maker != i) continue;
        Place& place = places[t.storage];
        if (place.home != Home::workspace || place.index != none) continue;
        place.index = static_cast<std::uint32_t>(buffers.size());
        buffers.push_back({t.storage, {trace.storages[t.storage].bytes, i, last[t.storage]}});
        steps[i].takes.push_back(place.index);
      }
    const CallAmongRanks* const call = traced.op->call_among_ranks();
    const void* const behind = call != nullptr ? call->line() : nullptr;
    std::erase_if(lent, [&](const auto& earlier) {
      if (earlier.first != behind) return false;
      buffers[earlier.second].life.end = i;
      return true;
    });
    for (std::size_t k = 0; k < traced.in.size(); ++k) {
      const TracedTensor& t = traced.in[k];
      if (call == nullptr || t.storage == none) continue;
      if (!traced.op->writes(k)) line[t.storage] = behind;
      const Place& place = places[t.storage];
      if (place.home == Home::workspace)
        steps[i].lends.push_back(place.index);
      else if (place.home != Home::output && last_write[t.storage] <= i)
        steps[i].lends_given = true;
    }
    for (const auto* list : {&traced.in, &traced.out})
      for (const TracedTensor& t : *list) {
        if (t.storage == none || last[t.storage] != i || places[t.storage].home != Home::workspace) continue;
        if (const void* its = std::exchange(line[t.storage], nullptr)) {
          buffers[places[t.storage].index].life.end = end;
          lent.emplace_back(its, places[t.storage].index);
        }
      }
  }
  place_buffers();
}

/// Finds each buffer its bytes, and those that take turns with it in them.
void Program::Impl::place_buffers() {
  for (std::uint32_t i = 0; i < buffers.size(); ++i) {
    const Device device = trace.storages[buffers[i].storage].device;
    auto its = std::ranges::find(workspaces, device, &Workspace::device);
    if (its == workspaces.end()) its = workspaces.insert(its, {device, {}, {}});
    its->buffers.push_back(i);
  }
  std::vector<bool> ever_lent(buffers.size());
  for (const Step& step : steps)
    for (const std::uint32_t i : step.lends) ever_lent[i] = true;
  for (Workspace& workspace : workspaces) {
    std::vector<Lifetime> lives;
    for (const std::uint32_t i : workspace.buffers) lives.push_back(buffers[i].life);
    workspace.packing = pack(lives, buffer_alignment);
    const auto begin = [&](std::size_t k) { return workspace.packing.offsets[k]; };
    const auto past = [&](std::size_t k) { return begin(k) + lives[k].bytes; };
    for (std::size_t j = 0; j < lives.size(); ++j) {
      if (!ever_lent[workspace.buffers[j]]) continue;
      for (std::size_t k = 0; k < lives.size(); ++k)
        if (begin(j) < past(k) && begin(k) < past(j))
          buffers[workspace.buffers[k]].turns.push_back(workspace.buffers[j]);
    }
  }
}

namespace {
/// The memory in which halves that this rank runs have their values, one after the other; one that runs
/// within another, in a hook, has its own.
struct HalvesWorkspace {
  std::size_t running = 0;
  std::vector<std::vector<Ref<Storage>>> memory;  // by halves around it: one a device
};
HalvesWorkspace& halves_workspace() { return Context::current().slot<HalvesWorkspace>(); }
}  // namespace

void free_halves_workspace() {
  HalvesWorkspace& workspace = halves_workspace();
  workspace.memory.resize(std::min(workspace.memory.size(), workspace.running));
}

/// Of the rank: a program that waits for its turn needs none.
void Program::Impl::share_workspace() {
  HalvesWorkspace& shared = halves_workspace();
  if (shared.memory.size() < shared.running) shared.memory.resize(shared.running);
  std::vector<Ref<Storage>>& memory = shared.memory[shared.running - 1];
  for (Workspace& workspace : workspaces) {
    auto its = std::ranges::find(memory, workspace.device, [](const auto& m) { return m->device(); });
    if (its == memory.end()) its = memory.insert(its, Storage::allocate(workspace.device, 0));
    if ((*its)->bytes() < workspace.packing.bytes) {
      *its = {};
      *its = Storage::allocate(workspace.device, workspace.packing.bytes);
    }
    if (workspace.within == (*its)->id()) continue;
    workspace.within = (*its)->id();
    for (std::size_t k = 0; k < workspace.buffers.size(); ++k) {
      Buffer& buffer = buffers[workspace.buffers[k]];
      const bool nothing = buffer.life.bytes == 0 || workspace.device.type == DeviceType::meta;
      buffer.memory =
          nothing ? Storage::allocate(workspace.device, buffer.life.bytes)
                  : Storage::wrap(workspace.device,
                                  static_cast<std::byte*>((*its)->data()) + workspace.packing.offsets[k],
                                  buffer.life.bytes);
    }
  }
}

/// At the first replay.
void Program::Impl::allocate_buffers() {
  if (cut) return share_workspace();
  for (const Workspace& workspace : workspaces) {
    Ref<Storage> all;
    for (std::size_t k = 0; k < workspace.buffers.size(); ++k) {
      Buffer& buffer = buffers[workspace.buffers[k]];
      if (buffer.memory) continue;
      if (buffer.life.bytes == 0 || workspace.device.type == DeviceType::meta) {
        buffer.memory = Storage::allocate(workspace.device, buffer.life.bytes);
        continue;
      }
      if (!all) all = Storage::allocate(workspace.device, workspace.packing.bytes);
      buffer.memory =
          Storage::wrap(workspace.device, static_cast<std::byte*>(all->data()) + workspace.packing.offsets[k],
                        buffer.life.bytes, [all] {});
    }
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
  const auto shares = [&](std::uint32_t other) { return values[other].storage == values[inputs[i]].storage; };
  for (const std::uint32_t v : places[values[inputs[i]].storage].tensors) {
    const auto [from, to] = bytes(v);
    const Tensor &part = values[v].tensor, &whole = values[inputs[i]].tensor;
    if (cut && std::ranges::count_if(inputs, shares) > 1) continue;
    check<StateError>(
        from == to || (from >= low && to <= high && is_part_of(part.layout(), whole.layout())),
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
                     given.device(), device);
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

bool Program::Impl::can_write(const std::vector<Tensor>& given) const {
  if (running_) return false;
  const bool recording = Context::current().grad_enabled();
  const auto memory = [&](std::size_t i) -> const Storage* {
    if (places[i].home == Home::input) return &given[places[i].index].storage();
    return places[i].home == Home::outside ? trace.storages[i].outside.get() : nullptr;
  };
  for (std::size_t i = 0; i < places.size(); ++i) {
    const Storage* written = trace.storages[i].rewritten ? memory(i) : nullptr;
    if (written == nullptr) continue;
    if (recording && written->histories() > 0) return false;
    for (std::size_t k = 0; k < places.size(); ++k)
      if (k != i && memory(k) == written) return false;
  }
  return true;
}

void Program::Impl::bind(std::uint32_t storage, const Ref<Storage>& memory, std::int64_t shift) {
  for (const std::uint32_t v : places[storage].tensors) {
    TensorImpl& impl = *values[v].tensor.impl();
    impl.storage = memory;
    impl.layout.offset = values[v].offset + shift;
  }
}

void Program::Impl::bind_input(std::size_t i, const Tensor& given) {
  bind(values[inputs[i]].storage, given.storage_ref(), given.layout().offset - values[inputs[i]].offset);
}

void Program::Impl::bind_all(const std::vector<Tensor>& given) {
  allocate_buffers();
  for (std::uint32_t i = 0; i < places.size(); ++i) {
    const Place& place = places[i];
    if (place.home == Home::workspace) {
      if (place.index != none) bind(i, buffers[place.index].memory);
    } else if (place.home == Home::output && !cut) {
      bind(i, Storage::allocate(trace.storages[i].device, trace.storages[i].bytes));
    } else if (place.home == Home::input) {
      bind_input(place.index, given[place.index]);
    }
  }
}

/// Drops inputs and outputs after a replay; between replays the program holds its workspace alone.
void Program::Impl::unbind() noexcept {
  for (const std::uint32_t i : replaced_) bind(buffers[i].storage, buffers[i].memory);
  replaced_.clear();
  for (std::uint32_t i = 0; i < places.size(); ++i)
    if (places[i].home != Home::outside && places[i].home != Home::workspace) bind(i, {});
}

struct Program::Impl::Bound {
  explicit Bound(Impl& impl) : impl(impl) {}
  ~Bound() { impl.unbind(); }
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;
  Impl& impl;
};

void Program::Impl::announce_write(Storage& storage) {
  if (storage.owned()) storage.owner()->before_write(storage);
  storage.bump_version();
}

/// Counts the writes of an op, before it runs: one that throws halfway has written too.
void Program::Impl::announce_writes(const Step& step) {
  for (std::size_t i = 0; i < step.bound_in.size(); ++i)
    if (step.op->writes(i)) announce_write(step.bound_in[i].storage());
}

/// Gives the step's values their buffers: other memory in this replay where a peer still has to come to a
/// call that the buffer was lent to. To wait for it could be for ever, since the peer may first wait for what
/// this rank does next.
void Program::Impl::take_buffers(const Step& step) {
  const auto is_lent = [&](std::uint32_t i) {
    std::erase_if(buffers[i].lent, [](const std::shared_ptr<LentCall>& call) {
      if (!call->over()) return false;
      call->wait();
      return true;
    });
    return !buffers[i].lent.empty();
  };
  for (const std::uint32_t i : step.takes) {
    bool lent = false;
    for (const std::uint32_t other : buffers[i].turns) lent = is_lent(other) || lent;
    if (lent) replace(i);
  }
}

void Program::Impl::replace(std::uint32_t buffer) {
  const Buffer& own = buffers[buffer];
  bind(own.storage, Storage::allocate(trace.storages[own.storage].device, own.life.bytes));
  replaced_.push_back(buffer);
}

void Program::Impl::lend(const Step& step) {
  if (step.lends.empty() && !step.lends_given) return;
  const std::shared_ptr<LentCall> call = step.op->call_among_ranks()->lent();
  if (!call) return;
  for (const std::uint32_t i : step.lends) buffers[i].lent.push_back(call);
  if (step.lends_given) lent_.push_back(call);
}

/// Until they have read what the program does not own: nobody asks it before the next write.
void Program::Impl::wait_for_peers() {
  for (const auto& call : lent_) call->wait();
  lent_.clear();
}

/// With the precision of the captured run, which may have differed from op to op.
void Program::Impl::run_op(Step& step) {
  *precision_ = step.precision;
  run_again(*step.op, step.bound_in, step.bound_out);
}

void Program::Impl::begin_step(const Step& step) {
  take_buffers(step);
  for (const Effect& effect : step.effects) effect.again();
}

void Program::Impl::run_step(Step& step) {
  if (step.op->is_view()) return;
  if (step.op->mutating()) announce_writes(step);
  run_op(step);
  lend(step);
}

void Program::Impl::run_steps() {
  for (Step& step : steps) {
    begin_step(step);
    run_step(step);
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
  Generator& generator = Context::current().generator();
  random.start = generator.state();
  generator.set_state({random.start.seed, random.start.offset + (random.end - random.first.offset)});
  const ReplayingRandom drawing(random);
  const Float32MatmulPrecisionScope restored(float32_matmul_precision());
  precision_ = &detail::float32_matmul_precision_here();
  const Bound bound(*this);
  bool by_graph = graph_takes(given) && ready_to_run();
  bind_all(given);
  if (graph && graph->calls)
    by_graph = graph->calls->vote(Question::run, by_graph ? Vote::yes : Vote::not_now) == Vote::yes;
  lent_.clear();  // of a replay that threw
  if (by_graph)
    run_graph(given);
  else
    run_steps();
  for (const Effect& effect : last_effects) effect.again();
  wait_for_peers();
  std::vector<Tensor> outputs;
  for (const std::uint32_t v : results) outputs.push_back(values[v].tensor.detach());
  return outputs;
}

std::vector<Tensor> Program::Impl::run_half(const std::vector<Tensor>& given, std::vector<Handed>& kept,
                                            RandomKey start) {
  const NoGrad no_grad;
  random.start = start;
  const ReplayingRandom drawing(random);
  const Float32MatmulPrecisionScope restored(float32_matmul_precision());
  precision_ = &detail::float32_matmul_precision_here();
  struct Running {
    bool& here;
    std::size_t& on_rank;
    Running(bool& is, std::size_t& count) : here(is), on_rank(count) { here = true, ++on_rank; }
    ~Running() { here = false, --on_rank; }
  } running(running_, halves_workspace().running);
  const Bound bound(*this);
  bind_all(given);
  for (const auto& [storage, number] : cut->kept) bind(storage, kept[number].memory, kept[number].shift);
  taken_.assign(results.size(), false);
  untaken_.assign(places.size(), 0);
  for (const std::uint32_t v : results) ++untaken_[values[v].storage];
  for (at_ = 0; at_ < steps.size(); ++at_) {
    Step& step = steps[at_];
    for (const Effect& effect : step.effects) effect.again();
    Resident resident;
    if (!step.brings.empty()) {
      const GradMode mode(step.recorded);
      const Tape::Moment moment(Context::current().slot<Tape>(), place_now ? place_now(step.place) : 0);
      for (const std::uint32_t s : step.brings) resident.bring(trace.storages[s].outside);
    }
    for (const std::uint32_t s : step.makes)
      bind(s, Storage::allocate(trace.storages[s].device, trace.storages[s].bytes));
    take_buffers(step);
    run_step(step);
    for (const std::uint32_t s : step.frees) {
      bind(s, {});
      kept[places[s].index].memory = {};
    }
  }
  for (const Effect& effect : last_effects) effect.again();
  for (const auto& [storage, number] : cut->made) {
    const Tensor& of = values[places[storage].tensors.front()].tensor;
    kept[number] = {of.storage_ref(), of.layout().offset - values[places[storage].tensors.front()].offset};
  }
  std::vector<Tensor> outputs;
  for (std::size_t r = 0; r < results.size(); ++r)
    outputs.push_back(taken_[r] ? Tensor{} : values[results[r]].tensor.detach());
  return outputs;
}

Tensor Program::Impl::take_result(std::uint32_t r) {
  const std::uint32_t storage = values[results[r]].storage;
  Tensor result = values[results[r]].tensor.detach();
  taken_[r] = true;
  const bool used_later = places[storage].home != Home::output || last_use_[storage] >= at_;
  if (--untaken_[storage] == 0 && !used_later) bind(storage, {});
  return result;
}

namespace {
template <class Print>
std::string listed(const std::vector<std::uint32_t>& ids, const Print& print) {
  std::string text;
  for (const std::uint32_t v : ids) text += (text.empty() ? "" : ", ") + print(v);
  return text;
}
}  // namespace

std::string Program::Impl::spec_at(std::uint32_t v) const {
  const Tensor& t = values[v].tensor;
  return describe({t.shape(), t.dtype(), trace.storages[values[v].storage].device});
}

std::string Program::Impl::name_at(std::uint32_t v) const { return v == none ? "none" : values[v].name; }

std::string Program::Impl::declared(std::uint32_t v) const { return name_at(v) + " : " + spec_at(v); }

std::string Program::Impl::line_of(const Step& step) const {
  const auto name = [&](std::uint32_t v) { return name_at(v); };
  return fmt::format("{} = {}({}) : {}", listed(step.out, name), step.op->text(), listed(step.in, name),
                     listed(step.out, [&](std::uint32_t v) { return spec_at(v); }));
}

std::string Program::Impl::returned() const {
  return "return " + listed(results, [&](std::uint32_t v) { return name_at(v); });
}

std::string Program::Impl::text() const {
  std::string text = "inputs " + listed(inputs, [&](std::uint32_t v) { return declared(v); }) + "\n";
  for (std::uint32_t v = 0; v < values.size(); ++v) {
    if (!values[v].name.starts_with("%p")) continue;
    text += "outside " + declared(v);
    // Another view of memory that was named before.
    const std::uint32_t base = places[values[v].storage].tensors.front();
    text += base != v ? ", in " + name_at(base) + "\n" : "\n";
  }
  if (cut)
    for (const auto& [storage, number] : cut->kept)
      if (!places[storage].tensors.empty())
        text += "kept " + declared(places[storage].tensors.front()) + "\n";
  const auto say = [&](const std::vector<Effect>& effects) {
    for (const Effect& effect : effects)
      if (!effect.name.empty()) text += effect.name + "\n";
  };
  for (const Step& step : steps) {
    say(step.effects);
    text += line_of(step) + "\n";
  }
  say(last_effects);
  if (cut)
    for (const auto& [storage, number] : cut->made)
      text += fmt::format("keep %k{} = {}\n", number, name_at(places[storage].tensors.front()));
  return text + returned() + "\n";
}

}  // namespace sherd
