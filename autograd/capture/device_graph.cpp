// Replaying a captured step as one recording of its device.
#include <algorithm>
#include <chrono>
#include <cstdint>

#include "autograd/capture/program.h"
#include "runtime/apply.h"
#include "runtime/backend.h"
#include "runtime/context.h"
#include "runtime/pause.h"
#include "runtime/reach.h"

namespace sherd {
namespace {

constexpr std::size_t widest_access = 64;  // bytes; kernels look at no more of an address

/// The bytes of a storage that a tensor's elements lie in.
struct InputBytes {
  std::size_t first = 0, count = 0;
};
InputBytes input_bytes(const Tensor& t, const Layout& layout) {
  if (layout.shape.numel() == 0) return {};
  const Reach reach = *Reach::of(layout);
  const auto size = static_cast<std::size_t>(size_of(t.dtype()));
  return {static_cast<std::size_t>(reach.low) * size,
          static_cast<std::size_t>(reach.high - reach.low + 1) * size};
}

std::byte* address(const Ref<Storage>& storage, std::size_t at) {
  return static_cast<std::byte*>(storage->data()) + at;
}

std::size_t alignment_of(const Tensor& t) {
  return reinterpret_cast<std::uintptr_t>(address(t.storage_ref(), input_bytes(t, t.layout()).first)) %
         widest_access;
}

}  // namespace

/// Whether `step` only brings to `device` what the program finds as it is: the rate of an optimizer, a batch.
bool Program::Impl::brings(const Step& step, Device device) const {
  const auto found = [&](std::uint32_t v) {
    if (v == TracedTensor::none) return true;
    const TracedStorage& storage = trace.storages[values[v].storage];
    const Home home = places[values[v].storage].home;
    return (home == Home::outside || home == Home::input) && !storage.rewritten;
  };
  const auto made_here = [&](std::uint32_t v) {
    return places[values[v].storage].home == Home::workspace &&
           trace.storages[values[v].storage].device == device;
  };
  return std::ranges::all_of(step.in, found) && std::ranges::all_of(step.out, made_here);
}

/// The device that all ops but those that bring values use; none where there is no such device, or memory has
/// an owner, who may put it elsewhere.
std::optional<Program::Impl::DeviceGraph> Program::Impl::plan_graph() const {
  const auto elsewhere = std::ranges::find_if(
      trace.storages, [](const TracedStorage& storage) { return !storage.device.is_cpu(); });
  if (elsewhere == trace.storages.end() || elsewhere->device.type == DeviceType::meta) return {};
  DeviceGraph planned{elsewhere->device, Context::current().id(), {}};
  for (const TracedStorage& storage : trace.storages)
    if (storage.outside && storage.outside->owned() && storage.outside->owner()->releases()) return {};
  for (std::uint32_t i = 0; i < steps.size(); ++i) {
    const auto there = [&](std::uint32_t v) {
      return v == TracedTensor::none || trace.storages[values[v].storage].device == planned.device;
    };
    const Step& step = steps[i];
    if (step.op->is_view() || (std::ranges::all_of(step.in, there) && std::ranges::all_of(step.out, there)))
      continue;
    if (!brings(step, planned.device)) return {};
    planned.bringing.push_back(i);
  }
  return planned;
}

/// Whether this replay goes by the graph, which is made at the first one on a thread.
bool Program::Impl::graph_takes(const std::vector<Tensor>& given) {
  if (graph && (graph->rank != Context::current().id() || (graph->calls && !graph->calls->current()))) {
    graph.reset();
    graph_attempts_ = attempts_with_calls_ = attempts;
  }
  if (!graph && attempts_with_calls_ > 0) {
    make_graph_with_calls(given);
    if (!graph && attempts_with_calls_ > 0) return false;
  }
  if (!graph && graph_attempts_ > 0) {
    --graph_attempts_;
    if (std::optional<DeviceGraph> planned = plan_graph())
      make_graph(std::move(*planned), given);
    else
      graph_attempts_ = 0;
  }
  if (!graph) return false;
  for (std::size_t i = 0; i < given.size(); ++i)
    if (graph->memory[values[inputs[i]].storage] && given[i].numel() > 0 &&
        alignment_of(given[i]) != graph->alignment[i])
      return false;
  return true;
}

/// Null where no rank's devices make the calls among ranks. Tensors are bound.
std::shared_ptr<RecordedCalls> Program::Impl::recorded_calls() const {
  std::vector<CapturedCall> calls;
  for (const Step& step : steps)
    if (step.op->call_among_ranks() != nullptr) calls.push_back({step.op.get(), step.bound_in});
  return calls.front().op->call_among_ranks()->recorded_calls(calls);
}

/// Every decision is one of all ranks: one that went another way would make other calls.
void Program::Impl::make_graph_with_calls(const std::vector<Tensor>& given) {
  const int left = std::exchange(attempts_with_calls_, 0);
  if (std::ranges::none_of(steps, [](const Step& step) { return step.op->call_among_ranks() != nullptr; }))
    return;
  bind_all(given);
  const std::shared_ptr<RecordedCalls> calls = recorded_calls();
  if (!calls) return;
  std::optional<DeviceGraph> planned = plan_graph();
  Vote vote = calls->vote(Question::plan, planned ? Vote::yes : Vote::no);
  if (vote == Vote::yes) vote = calls->meet_on(planned->device);
  if (vote == Vote::not_now) attempts_with_calls_ = left;
  if (vote != Vote::yes) return;
  planned->calls = calls;
  try {
    make_graph(std::move(*planned), given);
  } catch (const OutOfMemoryError&) {  // the others are told, and the step is made op by op
  }
  vote = calls->vote(Question::recording, graph ? Vote::yes : Vote::no);
  if (vote == Vote::yes) return;
  graph.reset();
  attempts_with_calls_ = vote == Vote::not_now ? left : left - 1;
}

void Program::Impl::make_graph(DeviceGraph made, const std::vector<Tensor>& given) {
  made.memory.resize(places.size());
  made.alignment.resize(given.size());
  made.shift.resize(given.size());
  bind_all(given);  // the workspace
  for (std::size_t i = 0; i < given.size(); ++i) {
    const std::uint32_t storage = values[inputs[i]].storage;
    if (trace.storages[storage].device != made.device) continue;
    Layout captured = values[inputs[i]].tensor.layout();
    captured.offset = values[inputs[i]].offset;
    const InputBytes own = input_bytes(given[i], captured);
    const auto size = static_cast<std::size_t>(size_of(given[i].dtype()));
    made.alignment[i] = given[i].numel() > 0 ? alignment_of(given[i]) : 0;
    if (made.alignment[i] % size != 0) return;
    made.memory[storage] = Storage::allocate(made.device, made.alignment[i] + own.count);
    made.shift[i] =
        static_cast<std::int64_t>(made.alignment[i] / size) - static_cast<std::int64_t>(own.first / size);
  }
  const auto keep = [&](std::uint32_t storage) {
    made.memory[storage] = Storage::allocate(made.device, trace.storages[storage].bytes);
  };
  for (std::uint32_t i = 0; i < places.size(); ++i)
    if (places[i].home == Home::output && trace.storages[i].device == made.device) keep(i);
  for (const std::uint32_t i : made.bringing)
    for (const std::uint32_t v : steps[i].out) keep(values[v].storage);
  bind_memory(made);
  std::uint32_t first = 0;
  const auto add_part = [&](std::uint32_t end) {
    for (std::uint32_t i = first; i < end; ++i)
      if (recorded(i, made)) return made.parts.push_back({first, end});
  };
  for (std::uint32_t i = 0; i < steps.size(); ++i) {
    if (steps[i].op->call_among_ranks() == nullptr || made.calls) continue;
    add_part(i);
    made.parts.push_back({i, i + 1});
    first = i + 1;
  }
  add_part(static_cast<std::uint32_t>(steps.size()));
  for (DeviceGraph::Part& part : made.parts)
    if ((made.calls || steps[part.first].op->call_among_ranks() == nullptr) && !record(part, made)) return;
  graph = std::move(made);
}

/// Puts the graph's own memory behind the tensors: what the hosts do between its parts, they do there too.
void Program::Impl::bind_memory(const DeviceGraph& of) {
  for (std::uint32_t i = 0; i < places.size(); ++i)
    if (of.memory[i]) bind(i, of.memory[i], places[i].home == Home::input ? of.shift[places[i].index] : 0);
}

bool Program::Impl::recorded(std::uint32_t step, const DeviceGraph& made) const {
  return !steps[step].op->is_view() && !std::ranges::binary_search(made.bringing, step);
}

/// The bytes of the device that an op uses, where its tensors are now.
std::vector<Use> Program::Impl::uses_of(const Step& step) {
  std::vector<Use> uses;
  const auto add = [&](const Tensor& t, bool writes) {
    if (!t.defined()) return;
    const InputBytes bytes = input_bytes(t, t.layout());
    const auto first = reinterpret_cast<std::uintptr_t>(address(t.storage_ref(), bytes.first));
    uses.push_back({first, first + bytes.count, writes});
  };
  for (std::size_t i = 0; i < step.bound_in.size(); ++i) add(step.bound_in[i], step.op->writes(i));
  for (const Tensor& t : step.bound_out) add(t, true);
  return uses;
}

/// False where the device cannot.
bool Program::Impl::record(DeviceGraph::Part& part, const DeviceGraph& made) {
  WorkInParts work;
  OpOrder order;
  std::vector<std::uint32_t> which;  // step is a part
  for (std::uint32_t i = part.first; i < part.end; ++i) {
    if (!recorded(i, made)) continue;
    which.push_back(i);
    const std::vector<Use> uses = uses_of(steps[i]);
    std::size_t bytes = 0;
    for (const Use& use : uses) bytes += use.past - use.first;
    const bool alone = steps[i].op->call_among_ranks() != nullptr;
    work.parts.push_back({bytes, alone ? order.next_alone() : order.next(uses)});
  }
  work.give = [&](std::uint32_t k) {
    if (k == 0 && made.calls) made.calls->begin();
    Step& step = steps[which[k]];
    if (step.op->call_among_ranks() != nullptr)
      made.calls->record({step.op.get(), step.bound_in});
    else
      run_op(step);
  };
  part.recording = backend(made.device.type).record(made.device, work);
  return part.recording != nullptr;
}

namespace {

/// Whether the hosts of all peers are, or will soon be, through with what was lent. A rank that is late is
/// waited for a moment, since what is not run as recorded takes longer; longer could be for ever.
template <class F>
bool soon(const F& over) {
  constexpr std::chrono::milliseconds moment{10};
  const auto begin = std::chrono::steady_clock::now();
  while (!over()) {
    if (std::chrono::steady_clock::now() - begin > moment) return false;
    pause_briefly();
  }
  return true;
}

bool is_over(const std::vector<std::shared_ptr<LentCall>>& lent) {
  return std::ranges::all_of(lent, &LentCall::over);
}

}  // namespace

/// Where devices make the calls nobody may wait for a host after it has agreed: its peers may be waiting for
/// their devices, which wait for this one.
bool Program::Impl::ready_to_run() const {
  return soon([&] {
    return is_over(graph->lent) && (!graph->calls || std::ranges::all_of(buffers, is_over, &Buffer::lent));
  });
}

bool Program::Impl::free_soon(const DeviceGraph::Part& part) const {
  return soon([&] {
    for (std::uint32_t i = part.first; i < part.end; ++i)
      for (const std::uint32_t taken : steps[i].takes)
        for (const std::uint32_t other : buffers[taken].turns)
          if (!is_over(buffers[other].lent)) return false;
    return true;
  });
}

/// Brings values, copies inputs in, runs, copies outputs and what was written of the inputs out.
void Program::Impl::run_graph(const std::vector<Tensor>& given) {
  struct Promise {  // to the ranks that have agreed to run it
    RecordedCalls* calls;
    ~Promise() {
      if (calls != nullptr) calls->give_up("a replay of the captured step ended before its recording ran");
    }
  } promise{graph->calls.get()};
  Backend& here = backend(graph->device.type);
  const auto copy = [&](void* to, const void* from, std::size_t bytes) {
    here.copy(to, graph->device, from, graph->device, bytes);
  };
  const auto each_input = [&](auto&& body) {
    for (std::size_t i = 0; i < given.size(); ++i) {
      const std::uint32_t storage = values[inputs[i]].storage;
      const InputBytes bytes = input_bytes(given[i], given[i].layout());
      if (graph->memory[storage] && bytes.count > 0)
        body(trace.storages[storage], address(given[i].storage_ref(), bytes.first),
             address(graph->memory[storage], graph->alignment[i]), bytes.count);
    }
  };
  const auto wait_for = [](std::vector<std::shared_ptr<LentCall>>& lent) {
    for (const auto& call : lent) call->wait();
    lent.clear();
  };
  wait_for(graph->lent);
  for (std::size_t i = 0; i < given.size(); ++i)  // the steps write the graph's memory
    if (trace.storages[values[inputs[i]].storage].rewritten && graph->memory[values[inputs[i]].storage])
      announce_write(given[i].storage());
  std::vector<std::pair<std::uint32_t, Ref<Storage>>> outputs;
  for (std::uint32_t i = 0; i < places.size(); ++i)
    if (places[i].home == Home::output && graph->memory[i])
      outputs.emplace_back(i, values[places[i].tensors.front()].tensor.storage_ref());
  bind_memory(*graph);
  each_input([&](const TracedStorage&, std::byte* theirs, std::byte* ours, std::size_t bytes) {
    copy(ours, theirs, bytes);
  });
  for (const std::uint32_t i : graph->bringing) run_op(steps[i]);
  bool as_recorded = true;  // in the memory that the recording knows
  for (const DeviceGraph::Part& part : graph->parts) {
    as_recorded = as_recorded && free_soon(part);
    for (std::uint32_t i = part.first; i < part.end; ++i) {
      Step& step = steps[i];
      if (!as_recorded && part.recording) {
        if (std::ranges::binary_search(graph->bringing, i)) continue;
        begin_step(step);
        run_step(step);
        continue;
      }
      begin_step(step);
      if (step.op->mutating()) announce_writes(step);
    }
    if (part.recording) {
      if (as_recorded) part.recording->run(random.start);
      promise.calls = nullptr;
      continue;
    }
    Step& call = steps[part.first];
    run_op(call);
    lend(call);
    const auto kept = [&](std::uint32_t v) {
      const Home home = places[values[v].storage].home;
      return home == Home::input || home == Home::output;
    };
    if (std::ranges::any_of(call.in, kept))
      if (const std::shared_ptr<LentCall> lent = call.op->call_among_ranks()->lent())
        graph->lent.push_back(lent);
  }
  each_input([&](const TracedStorage& traced, std::byte* theirs, std::byte* ours, std::size_t bytes) {
    if (traced.rewritten) copy(theirs, ours, bytes);
  });
  for (std::size_t i = 0; i < given.size(); ++i) bind_input(i, given[i]);
  for (auto& [i, output] : outputs) {
    if (trace.storages[i].bytes > 0)
      copy(address(output, 0), address(graph->memory[i], 0), trace.storages[i].bytes);
    bind(i, output);
  }
}

}  // namespace sherd
