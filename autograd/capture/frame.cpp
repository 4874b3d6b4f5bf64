#include "autograd/capture/frame.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "autograd/pass.h"
#include "autograd/region.h"
#include "autograd/tape.h"
#include "runtime/apply.h"

namespace sherd {
namespace {

constexpr std::size_t most_backwards = 8;  // of one forward

bool same(const Edge& a, const Edge& b) {
  return a.node == b.node && a.leaf == b.leaf && (!a.node || a.index == b.index);
}

std::uint64_t word(Device device) {
  return static_cast<std::uint64_t>(device.type) << 32 | static_cast<std::uint32_t>(device.index);
}

/// The op of a call's node.
class CompiledCall final : public AnyOp {
 public:
  static constexpr Peephole sums{.adds_gradients = ~Mask{0}, .of_several = true};
  explicit CompiledCall(std::shared_ptr<FrameCall> call) : call_(std::move(call)) {}
  std::string_view name() const override { return "compiled"; }
  std::string text() const override { return "compiled"; }
  Ref<const AnyOp> keep() const override { return Ref<const AnyOp>(this); }
  bool equals(const AnyOp& other) const override { return this == &other; }
  void prepare(Inputs, Tensors&) const override { refuse(); }
  const KernelRow& kernels() const override { refuse(); }
  const void* value() const override { refuse(); }
  bool differentiable() const override { return true; }
  Reads reads(Mask) const override { return {}; }
  const Peephole* peephole() const override { return &sums; }
  Tensors grad(const GradArgs& args) const override { return call_->frame->backward(*call_, args); }

 private:
  [[noreturn]] static void refuse() { fail<InternalError>("compiled: a node's op cannot be applied"); }
  std::shared_ptr<FrameCall> call_;
};

}  // namespace

void describe(std::span<const Tensor> tensors, Gradients gradients, Words& words) {
  words.push_back(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    const Layout& layout = t.layout();
    words.push_back(static_cast<std::uint64_t>(layout.shape.rank()) << 8 |
                    static_cast<std::uint64_t>(t.dtype()));
    words.push_back(word(t.device()));
    for (int d = 0; d < layout.shape.rank(); ++d) {
      words.push_back(static_cast<std::uint64_t>(layout.shape[d]));
      words.push_back(layout.shape[d] > 1 ? static_cast<std::uint64_t>(layout.strides[d]) : 0);
    }
    std::size_t first = 0;
    while (tensors[first].storage_ref() != t.storage_ref()) ++first;
    words.push_back(first);
    words.push_back(static_cast<std::uint64_t>(layout.offset - tensors[first].layout().offset));
    if (gradients == Gradients::ignored) continue;
    const bool wanted = wants_grad(t);
    std::size_t twin = 0;
    while (wanted && !(wants_grad(tensors[twin]) && same(record_of(tensors[twin])->edge, record_of(t)->edge)))
      ++twin;
    words.push_back(wanted ? twin + 1 : 0);
    words.push_back(static_cast<std::uint64_t>(t.is_leaf()));
    std::size_t handle = 0;
    while (!tensors[handle].is(t)) ++handle;
    words.push_back(handle);
  }
}

/// What a frame hears while it is traced. Unless it is strict, the first thing that cannot be captured ends
/// the tracing, and the ops go on.
class Frame::Tracer final : public CaptureTracer {
 public:
  Tracer(const std::vector<Tensor>& inputs, bool strict)
      : CaptureTracer(inputs, Sharing::allowed), strict_(strict) {
    for (const Tensor& t : inputs) known_.insert(t.impl());
  }

  void before_write(const AnyOp& op, Inputs in) override {
    attempt([&] { CaptureTracer::before_write(op, in); });
  }
  void after(const AnyOp& op, Inputs in, Outputs out) override {
    attempt([&] {
      check<StateError>(op.call_among_ranks() == nullptr,
                        "compile: {} is a call among ranks, which a compiled function cannot have yet",
                        op.name());
      look(in);
      CaptureTracer::after(op, in, out);
      for (const Tensor& t : out) known_.insert(t.impl());
    });
  }
  void host_read(const Tensor& tensor) override {
    attempt([&] { CaptureTracer::host_read(tensor); });
  }
  void unheard(std::string_view call) override {
    attempt([&] { CaptureTracer::unheard(call); });
  }

  template <class F>
  void attempt(F&& f) {
    if (!reason.empty()) return;
    if (strict_) return f();
    try {
      f();
    } catch (const Error& error) {
      reason = error.what();
    }
  }

  std::string reason;                          ///< why this cannot be captured
  std::vector<std::pair<Tensor, bool>> found;  ///< outside, and whether they want gradients

 private:
  /// Notes tensors from outside. One that shares an input's memory without coming from it would be taken for
  /// that input.
  void look(Inputs in) {
    for (const Tensor& t : in) {
      if (!t.defined() || known_.contains(t.impl())) continue;
      const std::uint32_t storage = index_of(t.storage());
      const bool of_input = std::ranges::count(inputs(), storage) > 0;
      const AutogradRecord* record = record_of(t);
      const bool foreign = !t.impl()->alias || (record != nullptr && record->leaf);
      check<StateError>(
          !of_input || !foreign,
          "compile: a tensor of shape {} from outside shares memory with an input; pass a clone", t.shape());
      if (storage != TracedTensor::none && !trace().storages[storage].outside) continue;
      known_.insert(t.impl());
      found.emplace_back(t, wants_grad(t));
    }
  }

  bool strict_;
  std::unordered_set<const TensorImpl*> known_;
};

/// What eager ops recorded between the inputs and the outputs.
struct Frame::Graph {
  std::uint64_t since;
  std::vector<Ref<Node>> nodes{};  // oldest first
  std::unordered_map<const Node*, std::uint32_t> place{};
  bool has(const Edge& edge) const { return edge.node && edge.node->sequence >= since; }
};

namespace {

/// StateError for what the ops made and somebody beside the graph and the outputs has: a program could not
/// renew it. And for kept values that were written since.
template <class Nodes>
void check_held(const CaptureTracer& tracer, const Nodes& nodes, const std::vector<Tensor>& outputs) {
  std::unordered_map<const Storage*, std::uint32_t> handles;
  std::unordered_set<const Trace*> regions;
  const auto kept = [&](const SavedTensor& saved) {
    if (!saved.value.defined()) return;
    const Storage& storage = saved.value.storage();
    check<StateError>(storage.version() == saved.version,
                      "compile: a value of shape {} that a gradient needs was changed in place",
                      saved.value.shape());
    ++handles[&storage];
    if (!storage.owned()) return;
    const Trace* again = region_trace(*storage.owner());
    check<StateError>(again != nullptr, "compile: a value of shape {} that a gradient needs has an owner",
                      saved.value.shape());
    if (!regions.insert(again).second) return;
    for (const TracedStorage& from : again->storages) {
      if (!from.outside) continue;
      check<StateError>(
          from.version == from.outside->version() && !from.outside->owned(),
          "compile: a tensor of {} bytes that recompute reads was changed in place, or has an owner",
          from.bytes);
      ++handles[from.outside.get()];
    }
  };
  for (const Ref<Node>& node : nodes) {
    for (const SavedTensor& saved : node->saved_inputs) kept(saved);
    for (const SavedTensor& saved : node->saved_outputs) kept(saved);
  }
  std::unordered_set<const TensorImpl*> returned;
  for (const Tensor& t : outputs)
    if (returned.insert(t.impl()).second) ++handles[&t.storage()];
  std::size_t explained = 0, alive = 0;
  for (const auto& [storage, count] : handles) {
    const std::uint32_t i = tracer.index_of(*storage);
    if (i == TracedTensor::none || tracer.trace().storages[i].outside || !tracer.is_alive(i)) continue;
    ++explained;
    check<StateError>(
        storage->use_count() == count,
        "compile: a tensor of {} bytes that was made inside is still held after the call and is "
        "not returned",
        storage->bytes());
  }
  for (std::uint32_t i = 0; i < tracer.trace().storages.size(); ++i) alive += tracer.is_alive(i) ? 1 : 0;
  check<StateError>(alive == explained,
                    "compile: {} tensors that were made inside are still held after the call and are not "
                    "returned",
                    alive - explained);
}

}  // namespace

Frame::Graph Frame::graph_of(Tracer& tracer, const std::vector<Tensor>& outputs, std::uint64_t since) {
  Graph graph{since};
  std::unordered_set<const Node*> seen;
  std::vector<Node*> stack;
  const auto meet = [&](const Edge& edge) {
    if (!graph.has(edge) || !seen.insert(edge.node.get()).second) return;
    graph.nodes.push_back(edge.node);
    stack.push_back(edge.node.get());
  };
  for (const Tensor& t : outputs)
    if (wants_grad(t)) meet(record_of(t)->edge);
  while (!stack.empty()) {
    const Node* node = stack.back();
    stack.pop_back();
    check<StateError>(!node->freed, "compile: a backward inside went through {}; return the loss instead",
                      node->op->name());
    for (const auto& hooks : node->hooks)
      check<StateError>(hooks.empty(), "compile: the result of {} has a hook, which a program would not call",
                        node->op->name());
    for (const Edge& edge : node->edges) meet(edge);
  }
  std::ranges::sort(graph.nodes, {}, [](const Ref<Node>& node) { return node->sequence; });
  for (std::uint32_t i = 0; i < graph.nodes.size(); ++i) graph.place.emplace(graph.nodes[i].get(), i);
  check_held(tracer, graph.nodes, outputs);
  return graph;
}

/// The number of a storage that a gradient reads.
std::uint32_t Frame::keep(Tracer& tracer, const Ref<Storage>& storage, FrameCall& call) {
  const std::uint32_t i = tracer.index_of(*storage);
  const bool outside = i == TracedTensor::none || tracer.trace().storages[i].outside;
  const auto known = std::ranges::find_if(
      kept_, [&](const KeptFrom& from) { return outside ? from.outside == storage : from.storage == i; });
  const auto number = static_cast<std::uint32_t>(known - kept_.begin());
  if (known != kept_.end()) return number;
  kept_.push_back(outside ? KeptFrom{TracedTensor::none, storage} : KeptFrom{i});
  call.kept.push_back({storage});
  return number;
}

/// The number of a storage that a region of `recompute` makes again.
std::uint32_t Frame::keep_region(Tracer& tracer, const Storage& storage, FrameCall& call,
                                 std::vector<const StorageOwner*>& met) {
  const StorageOwner& owner = *storage.owner();
  const auto region = static_cast<std::uint32_t>(std::ranges::find(met, &owner) - met.begin());
  if (region == met.size()) {
    met.push_back(&owner);
    Again again{*region_trace(owner)};
    for (std::uint32_t i = 0; i < again.trace.storages.size(); ++i)
      if (const Ref<Storage> outside = std::exchange(again.trace.storages[i].outside, {}))
        again.outside.emplace_back(i, keep(tracer, outside, call));
    regions_.push_back(std::move(again));
  }
  const std::uint32_t index = region_index(owner, storage);
  const auto known = std::ranges::find_if(
      kept_, [&](const KeptFrom& from) { return from.region == region && from.index == index; });
  const auto number = static_cast<std::uint32_t>(known - kept_.begin());
  if (known != kept_.end()) return number;
  kept_.push_back({TracedTensor::none, {}, region, index});
  call.kept.emplace_back();
  return number;
}

Frame::Way Frame::way_of(const Edge& edge, const Spec& spec, const Graph& graph,
                         const std::vector<Tensor>& inputs) {
  if (!edge) return {};
  if (graph.has(edge)) return {Way::To::node, graph.place.at(edge.node.get()), edge.index};
  Target target{{}, edge.leaf, spec};
  for (std::uint32_t i = 0; i < inputs.size() && !target.input; ++i)
    if (wants_grad(inputs[i]) && same(record_of(inputs[i])->edge, edge)) target.input = i;
  check<StateError>(target.input || edge.leaf,
                    "compile: a tensor of shape {} that has a history comes neither from the inputs nor from "
                    "inside; pass it as an input",
                    spec.shape);
  const auto known = std::ranges::find_if(targets_, [&](const Target& other) {
    return other.input == target.input && (target.input || other.leaf == target.leaf);
  });
  const auto index = static_cast<std::uint32_t>(known - targets_.begin());
  if (known == targets_.end()) targets_.push_back(std::move(target));
  return {Way::To::target, index, 0};
}

void Frame::learn_nodes(Tracer& tracer, const Graph& graph, const std::vector<Tensor>& inputs,
                        FrameCall& call) {
  std::vector<const StorageOwner*> met;
  const auto kept = [&](const SavedTensor& saved) -> std::optional<KeptTensor> {
    if (!saved.value.defined()) return {};
    const std::uint32_t number = saved.value.storage().owned()
                                     ? keep_region(tracer, saved.value.storage(), call, met)
                                     : keep(tracer, saved.value.storage_ref(), call);
    return KeptTensor{number, saved.value.layout(), saved.value.dtype()};
  };
  for (const Ref<Node>& node : graph.nodes) {
    Recipe& recipe = recipes_.emplace_back();
    recipe.op = node->op;
    recipe.specs = node->specs;
    recipe.results = node->outputs;
    for (std::size_t i = 0; i < node->edges.size(); ++i)
      recipe.ways.push_back(way_of(node->edges[i], node->specs[i], graph, inputs));
    for (const SavedTensor& saved : node->saved_inputs) recipe.inputs.push_back(kept(saved));
    for (const SavedTensor& saved : node->saved_outputs) recipe.outputs.push_back(kept(saved));
  }
}

/// The call's node has an edge to each target. A leaf of 16 bits has one for each use, in the order of a
/// backward, since a pass counts them, and sums more than two in f32.
void Frame::number_edges() {
  std::vector<std::uint32_t> uses(targets_.size());
  for (const Recipe& recipe : recipes_)
    for (const Way& way : recipe.ways)
      if (way.to == Way::To::target) ++uses[way.index];
  const auto apart = [&](std::uint32_t t) {
    return targets_[t].leaf && size_of(targets_[t].spec.dtype) == 2 && uses[t] > 1;
  };
  for (auto recipe = recipes_.rbegin(); recipe != recipes_.rend(); ++recipe)
    for (Way& way : recipe->ways) {
      if (way.to != Way::To::target || !apart(way.index)) continue;
      way.output = static_cast<std::uint32_t>(edges_.size());
      edges_.push_back(way.index);
    }
  for (std::uint32_t t = 0; t < targets_.size(); ++t)
    if (!apart(t)) edges_.push_back(t);
  for (std::uint32_t t = 0; t < targets_.size(); ++t)
    targets_[t].edge = static_cast<std::uint32_t>(std::ranges::find(edges_, t) - edges_.begin());
  for (Recipe& recipe : recipes_)
    for (Way& way : recipe.ways)
      if (way.to == Way::To::target && !apart(way.index)) way.output = targets_[way.index].edge;
}

/// Returns those that the program returns.
std::vector<Tensor> Frame::learn_outputs(Tracer& tracer, const Graph& graph,
                                         const std::vector<Tensor>& inputs,
                                         const std::vector<Tensor>& outputs) {
  std::vector<Tensor> results;
  std::vector<Edge> ends;
  for (const Tensor& t : outputs) {
    Output& output = outputs_.emplace_back();
    output.defined = t.defined();
    for (std::uint32_t i = 0; i < inputs.size() && output.defined && !output.input; ++i)
      if (t.is(inputs[i])) output.input = i;
    for (std::uint32_t i = 0; i + 1 < outputs_.size() && output.defined && !output.twin; ++i)
      if (t.is(outputs[i])) output.twin = i;
    if (!output.defined || output.input || output.twin) continue;
    const bool wanted = wants_grad(t), inside = wanted && graph.has(record_of(t)->edge);
    const std::uint32_t storage = tracer.index_of(t.storage());
    const bool of_input = std::ranges::count(tracer.inputs(), storage) > 0;
    const bool outside = !of_input && (storage == TracedTensor::none ||
                                       static_cast<bool>(tracer.trace().storages[storage].outside));
    if (outside && !inside) {
      check<StateError>(!tracer.is_of_host(t.storage()) && (!wanted || record_of(t)->edge.leaf),
                        "compile: output {} is made of the host's values, or has a history from elsewhere",
                        outputs_.size() - 1);
      output.outside = t;
      continue;
    }
    check<StateError>(!wanted || inside,
                      "compile: output {} requires grad, and its history does not begin inside",
                      outputs_.size() - 1);
    output.view = t.impl()->view;
    output.alias = t.impl()->alias;
    output.result = static_cast<std::uint32_t>(results.size());
    results.push_back(t);
    if (!inside) continue;
    const AutogradRecord& record = *record_of(t);
    output.computed = record.computed();
    const auto known = std::ranges::find_if(ends, [&](const Edge& end) { return same(end, record.edge); });
    output.gradient = static_cast<std::uint32_t>(known - ends.begin());
    if (known != ends.end()) continue;
    ends.push_back(record.edge);
    result_ways_.push_back(way_of(record.edge, t.spec(), graph, inputs));
    result_specs_.push_back(t.spec());
  }
  return results;
}

/// Reads from a traced call what replays need.
void Frame::learn(Tracer& tracer, const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs,
                  std::uint64_t since, FrameCall& call) {
  std::vector<Tensor> defined;
  for (const Tensor& t : outputs)
    if (t.defined()) defined.push_back(t);
  for (const Tensor& t : inputs)
    check<StateError>(!record_of(t) || !record_of(t)->edge.node || record_of(t)->edge.node->sequence < since,
                      "compile: an input of shape {} is written in place and got a history", t.shape());
  tracer.check_constants();
  tracer.check_untouched(inputs, defined);
  tracer.check_drawn();
  const Graph graph = graph_of(tracer, defined, since);
  learn_nodes(tracer, graph, inputs, call);
  number_edges();
  const std::vector<Tensor> results = learn_outputs(tracer, graph, inputs, outputs);
  found_ = std::move(tracer.found);
  Recorded recorded = tracer.take(inputs, results);
  begin_ = recorded.random_begin;
  end_ = recorded.random_end;
  Program::Impl::Cut cut;
  for (std::uint32_t k = 0; k < kept_.size(); ++k)
    if (kept_[k].storage != TracedTensor::none) cut.made.emplace_back(kept_[k].storage, k);
  forward_ = std::make_unique<Program::Impl>(std::move(recorded), std::vector<Tensor>{}, std::move(cut));
}

std::vector<Tensor> Frame::trace(const std::vector<Tensor>& inputs,
                                 const std::function<std::vector<Tensor>()>& body, bool strict) {
  std::vector<Edge> before;
  for (const Tensor& t : inputs)
    if (const AutogradRecord* record = record_of(t)) before.push_back(record->edge);
  const std::uint64_t since = Context::current().slot<Tape>().sequence_behind(before);
  const auto call = std::make_shared<FrameCall>(FrameCall{shared_from_this(), {}});
  call->start = Context::current().generator().state();
  std::vector<Tensor> outputs;
  Tracer tracer(inputs, strict);
  {
    const Listening listening(tracer);
    outputs = body();
  }
  tracer.attempt([&] { learn(tracer, inputs, outputs, since, *call); });
  unfit_ = tracer.reason;
  if (unfit_.empty()) {
    find_edges(*call, inputs);
    attach(call, outputs);
  }
  return outputs;
}

/// What a call's node is to know when the forward is over.
void Frame::find_edges(FrameCall& call, const std::vector<Tensor>& inputs) const {
  for (const Target& target : targets_)
    call.edges.push_back(target.input ? record_of(inputs[*target.input])->edge : Edge{{}, 0, target.leaf});
  for (std::size_t i = 0; i < targets_.size() && targets_[i].input; ++i)
    for (std::size_t j = 0; j < targets_.size(); ++j)
      call.twins = call.twins || (i != j && same(call.edges[i], call.edges[j]));
  for (const Program::Impl::Handed& kept : call.kept)
    call.versions.push_back(kept.memory ? kept.memory->version() : 0);
}

/// Gives the outputs of a call one node as their history.
void Frame::attach(const std::shared_ptr<FrameCall>& call, const std::vector<Tensor>& outputs) {
  if (targets_.empty()) return;
  auto node = make_ref<Node>();
  node->op = make_ref<const CompiledCall>(call);
  for (const std::uint32_t t : edges_) {
    node->edges.push_back(call->edges[t]);
    node->saved_inputs.push_back({});
    node->specs.push_back(targets_[t].spec);
  }
  node->sequence = Context::current().slot<Tape>().sequence_behind(call->edges);
  for (const Spec& spec : result_specs_) {
    node->outputs.push_back(spec);
    node->saved_outputs.push_back({});
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Output& output = outputs_[i];
    if (!output.gradient) continue;
    AutogradRecord& record = ensure_record(outputs[i]);
    if (record.requires_grad)
      record.edge = {node, *output.gradient, {}};
    else
      record.set_history(node, *output.gradient, output.computed ? &outputs[i].storage() : nullptr);
  }
}

bool Frame::holds() const {
  return std::ranges::all_of(found_,
                             [](const auto& found) { return wants_grad(found.first) == found.second; });
}

std::vector<Tensor> Frame::replay(const std::vector<Tensor>& inputs) {
  const auto call = std::make_shared<FrameCall>(FrameCall{shared_from_this(), {}});
  Generator& generator = Context::current().generator();
  call->start = generator.state();
  call->kept.resize(kept_.size());
  for (std::size_t k = 0; k < kept_.size(); ++k) call->kept[k].memory = kept_[k].outside;
  generator.set_state({call->start.seed, call->start.offset + (end_.offset - begin_.offset)});
  const std::vector<Tensor> results = forward_->run_half(inputs, call->kept, call->start);
  std::vector<Tensor> outputs;
  for (const Output& output : outputs_) {
    Tensor& t = outputs.emplace_back();
    t = output.input    ? inputs[*output.input]
        : output.twin   ? outputs[*output.twin]
        : output.result ? results[*output.result]
                        : output.outside;
    if (!output.result) continue;
    t.impl()->view = output.view;
    t.impl()->alias = output.alias;
    t.impl()->view_version = t.storage().version();
  }
  find_edges(*call, inputs);
  attach(call, outputs);
  return outputs;
}

/// The op with the random numbers of this call.
Ref<const AnyOp> Frame::op_of(const FrameCall& call, const Ref<const AnyOp>& op) const {
  const RandomKey* drawn = op->random_key();
  if (drawn == nullptr || drawn->seed != begin_.seed || drawn->offset < begin_.offset ||
      drawn->offset >= end_.offset)
    return op;
  return op->keep_drawing({call.start.seed, call.start.offset + (drawn->offset - begin_.offset)});
}

/// What is kept, by number: regions of `recompute` are made anew around what the call kept for them.
std::vector<Ref<Storage>> Frame::storages_of(const FrameCall& call) const {
  std::vector<std::shared_ptr<StorageOwner>> regions;
  for (const Again& again : regions_) {
    Trace trace = again.trace;
    std::vector<std::int64_t> shift(trace.storages.size());
    for (const auto& [storage, number] : again.outside) {
      trace.storages[storage].outside = call.kept[number].memory;
      trace.storages[storage].version = call.versions[number];
      shift[storage] = call.kept[number].shift;
    }
    for (TracedOp& traced : trace.ops) {
      traced.op = op_of(call, traced.op);
      for (auto* list : {&traced.in, &traced.out})
        for (TracedTensor& t : *list)
          if (t.storage != TracedTensor::none) t.layout.offset += shift[t.storage];
    }
    regions.push_back(make_region(std::move(trace)));
  }
  std::vector<Ref<Storage>> storages;
  for (std::size_t k = 0; k < kept_.size(); ++k)
    storages.push_back(kept_[k].region ? released_by(regions[*kept_[k].region], kept_[k].index)
                                       : call.kept[k].memory);
  return storages;
}

/// By the graph that eager ops would have recorded, made anew of what the call kept.
Tensors Frame::differentiate(const FrameCall& call, const GradArgs& args) const {
  Tape& tape = Context::current().slot<Tape>();
  const std::uint64_t since = tape.sequence_behind(call.edges);
  const std::vector<Ref<Storage>> storages = storages_of(call);
  std::vector<Ref<Node>> nodes;
  // Of a leaf whose gradient the pass sums in f32, each use goes to a leaf of its own.
  std::vector<Ref<Leaf>> uses(edges_.size());
  for (std::size_t i = 0; i < edges_.size(); ++i)
    if (args.beside.is_in_f32(i)) uses[i] = make_ref<Leaf>(targets_[edges_[i]].spec);
  const auto edge = [&](const Way& way) -> Edge {
    if (way.to == Way::To::target && uses[way.output]) return {{}, 0, uses[way.output]};
    if (way.to == Way::To::target) return call.edges[way.index];
    return way.to == Way::To::node ? Edge{nodes[way.index], way.output, {}} : Edge{};
  };
  const auto saved = [&](const std::optional<KeptTensor>& kept) -> SavedTensor {
    if (!kept) return {};
    Layout layout = kept->layout;
    layout.offset += call.kept[kept->number].shift;
    return {Tensor(make_ref<TensorImpl>(storages[kept->number], std::move(layout), kept->dtype)),
            call.versions[kept->number]};
  };
  for (const Recipe& recipe : recipes_) {
    Ref<Node>& node = nodes.emplace_back(make_ref<Node>());
    node->op = op_of(call, recipe.op);
    for (const Way& way : recipe.ways) node->edges.push_back(edge(way));
    for (const auto& kept : recipe.inputs) node->saved_inputs.push_back(saved(kept));
    for (const auto& kept : recipe.outputs) node->saved_outputs.push_back(saved(kept));
    node->specs = recipe.specs;
    node->outputs = recipe.results;
    node->sequence = tape.sequence_behind({node->edges.begin(), node->edges.end()});
  }
  BackwardPass pass("backward", {.retain_graph = args.retain_graph, .create_graph = args.create_graph});
  for (std::size_t i = 0; i < args.gy.size(); ++i)
    if (args.gy[i].defined()) pass.seed(edge(result_ways_[i]), args.gy[i]);
  std::vector<Edge> wanted;
  Tensors so_far;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < edges_.size(); ++i) {
    if (!args.need(i) || (!uses[i] && i != targets_[edges_[i]].edge)) continue;
    wanted.push_back(uses[i] ? Edge{{}, 0, uses[i]} : call.edges[edges_[i]]);
    so_far.push_back(i < args.beside.so_far.size() ? args.beside.so_far[i] : Tensor{});
    places.push_back(i);
  }
  std::vector<Tensor> found = pass.partial(wanted, {so_far.begin(), so_far.size()}, since);
  Tensors gradients(edges_.size());
  for (std::size_t k = 0; k < places.size(); ++k) gradients[places[k]] = std::move(found[k]);
  return gradients;
}

bool Frame::unchanged(const FrameCall& call, const std::vector<std::uint32_t>& numbers) {
  return std::ranges::all_of(
      numbers, [&](std::uint32_t k) { return call.kept[k].memory->version() == call.versions[k]; });
}

Frame::Backward* Frame::find(const Words& words) {
  const auto its = std::ranges::find(backwards_, words, &Backward::key);
  if (its == backwards_.end()) return nullptr;
  backwards_.splice(backwards_.begin(), backwards_, its);
  return &backwards_.front();
}

Tensors Frame::run(Backward& backward, FrameCall& call, const GradArgs& args,
                   const std::vector<Tensor>& given) {
  std::vector<Program::Impl::Handed> kept;
  if (args.retain_graph) {
    kept = call.kept;
  } else {
    kept.resize(call.kept.size());
    for (const std::uint32_t k : backward.reads) kept[k] = std::move(call.kept[k]);
    call.kept.clear();
  }
  const std::vector<Tensor> results = backward.program->run_half(given, kept, call.start);
  Tensors gradients(edges_.size());
  for (std::size_t i = 0; i < edges_.size(); ++i)
    if (backward.results[i]) gradients[i] = results[*backward.results[i]];
  return gradients;
}

/// Makes a program of what was heard of a backward.
void Frame::learn_backward(Tracer& tracer, const FrameCall& call, const std::vector<Tensor>& given,
                           const Tensors& gradients, Backward& made) const {
  std::vector<Tensor> results;
  for (const Tensor& gradient : gradients) {
    made.results.push_back(gradient.defined() ? std::optional(static_cast<std::uint32_t>(results.size()))
                                              : std::nullopt);
    if (gradient.defined()) results.push_back(gradient);
  }
  tracer.check_alive(results);
  tracer.check_constants();
  tracer.check_untouched(given, results);
  tracer.check_drawn();
  const auto number_of = [&](const Storage* storage) {
    const auto known = std::ranges::find_if(
        call.kept, [&](const Program::Impl::Handed& kept) { return kept.memory.get() == storage; });
    return static_cast<std::uint32_t>(known - call.kept.begin());
  };
  for (const Tensor& t : given)
    check<StateError>(number_of(&t.storage()) == call.kept.size(),
                      "compile: a gradient of shape {} shares memory with what the backward reads",
                      t.shape());
  Program::Impl::Cut cut;
  for (std::uint32_t i = 0; i < tracer.trace().storages.size(); ++i) {
    const TracedStorage& storage = tracer.trace().storages[i];
    const bool input = std::ranges::count(tracer.inputs(), i) > 0;
    check<StateError>(!storage.rewritten || (!input && !storage.outside),
                      "compile: a backward writes a tensor of {} bytes that it did not make", storage.bytes);
    if (!storage.outside) continue;
    const std::uint32_t k = number_of(storage.outside.get());
    check<StateError>(k < call.kept.size() || tracer.is_of_host(*storage.outside),
                      "compile: a backward reads a tensor of {} bytes that is neither kept nor given",
                      storage.bytes);
    if (k == call.kept.size()) continue;
    made.reads.push_back(k);
    if (kept_[k].storage != TracedTensor::none) cut.kept.emplace_back(i, k);
  }
  Recorded recorded = tracer.take(given, results);
  check<StateError>(recorded.random_begin == recorded.random_end, "compile: a backward draws random numbers");
  recorded.random_begin = call.start;
  recorded.random_end = {call.start.seed, call.start.offset + (end_.offset - begin_.offset)};
  made.program = std::make_unique<Program::Impl>(std::move(recorded), std::vector<Tensor>{}, std::move(cut));
}

Tensors Frame::trace_backward(const FrameCall& call, const GradArgs& args, const std::vector<Tensor>& given,
                              Words words) {
  Tracer tracer(given, false);
  Tensors gradients;
  {
    const Listening listening(tracer);
    gradients = differentiate(call, args);
  }
  Backward made{std::move(words), nullptr, {}, {}};
  tracer.attempt([&] { learn_backward(tracer, call, given, gradients, made); });
  if (!tracer.reason.empty()) made.program = nullptr;
  backwards_.push_front(std::move(made));
  if (backwards_.size() > most_backwards) backwards_.pop_back();
  return gradients;
}

Tensors Frame::backward(FrameCall& call, const GradArgs& args) {
  check<StateError>(call.kept.size() == kept_.size(),
                    "backward of compiled: an earlier backward broke off and let go of what it read; run the "
                    "forward again");
  std::vector<Tensor> given;
  Words words(args.needs.begin(), args.needs.end());
  const auto add = [&](const Tensor& t) {
    words.push_back(t.defined() ? 1 : 0);
    if (t.defined()) given.push_back(t);
  };
  for (const Tensor& t : args.gy) add(t);
  words.insert(words.end(), args.beside.in_f32.begin(), args.beside.in_f32.end());
  words.push_back(args.beside.so_far.size());
  for (const Tensor& t : args.beside.so_far) add(t);
  describe(given, Gradients::ignored, words);
  words.push_back(static_cast<std::uint64_t>(float32_matmul_precision()));
  Tensors gradients;
  Backward* known = find(words);
  if (args.create_graph || call.twins || sherd::Tracer::active())
    gradients = differentiate(call, args);
  else if (known == nullptr)
    gradients = trace_backward(call, args, given, std::move(words));
  else if (known->program == nullptr || !unchanged(call, known->reads))
    gradients = differentiate(call, args);
  else
    gradients = run(*known, call, args, given);
  if (!args.retain_graph) {
    call.kept.clear();
    call.edges.clear();
  }
  return gradients;
}

std::string Frame::text() const {
  if (!unfit_.empty()) return "runs eagerly: " + unfit_ + "\n";
  std::string text = "forward\n" + forward_->text();
  for (const Backward& backward : backwards_)
    text += backward.program ? "backward\n" + backward.program->text() : "backward runs eagerly\n";
  return text;
}

std::vector<std::size_t> Frame::ops() const {
  std::vector<std::size_t> ops;
  if (forward_) ops.push_back(forward_->steps.size());
  for (const Backward& backward : backwards_)
    if (backward.program) ops.push_back(backward.program->steps.size());
  return ops;
}

}  // namespace sherd
