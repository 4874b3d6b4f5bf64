// How a frame learns its forward from a call that it heard.
#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <unordered_set>

#include "autograd/capture/frame_tracer.h"
#include "autograd/capture/partition.h"
#include "autograd/capture/resident.h"
#include "autograd/region.h"
#include "autograd/tape.h"

namespace sherd {

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
    if (again == nullptr || !regions.insert(again).second) return;
    for (const TracedStorage& from : again->storages) {
      if (!from.outside) continue;
      check<StateError>(
          from.version == from.outside->version() && (!from.outside->owned() || is_brought(*from.outside)),
          "compile: a tensor of {} bytes that recompute reads was changed in place, or is of another region",
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
  std::unordered_set<std::uint32_t> explained;
  for (const auto& [storage, count] : handles) {
    const std::uint32_t i = tracer.index_of(*storage);
    const bool inside = i != TracedTensor::none && !tracer.trace().storages[i].outside;
    if (inside && storage->use_count() == count) explained.insert(i);
  }
  for (std::uint32_t i = 0; i < tracer.trace().storages.size(); ++i) {
    if (!tracer.is_alive(i) || explained.contains(i)) continue;
    const std::uint32_t maker = tracer.trace().storages[i].maker;
    fail<StateError>(
        "compile: the result of {} ({} bytes) is still held after the call and is not returned; "
        "return it, or keep none of it in a member",
        maker == TracedTensor::none ? "an op" : tracer.trace().ops[maker].op->name(),
        tracer.trace().storages[i].bytes);
  }
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
    const Storage& storage = saved.value.storage();
    const std::uint32_t number = storage.owned() && !is_brought(storage)
                                     ? keep_region(tracer, storage, call, met)
                                     : keep(tracer, saved.value.storage_ref(), call);
    return KeptTensor{number, saved.value.layout(), saved.value.dtype()};
  };
  for (const Ref<Node>& node : graph.nodes) {
    Recipe& recipe = recipes_.emplace_back();
    recipe.op = node->op;
    recipe.specs = node->specs;
    recipe.results = node->outputs;
    recipe.marks = static_cast<std::size_t>(std::ranges::lower_bound(tracer.marks, node->sequence) -
                                            tracer.marks.begin());
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
  order_edges();
}

/// A backward has a leaf's gradient whole at the op that used it first; of one op's, in the order of its
/// inputs. So they leave, and hooks on them run.
void Frame::order_edges() {
  std::vector<std::pair<std::size_t, std::size_t>> first_use(edges_.size(), {none, none});
  for (std::size_t r = 0; r < recipes_.size(); ++r)
    for (std::size_t i = 0; i < recipes_[r].ways.size(); ++i) {
      const Way& way = recipes_[r].ways[i];
      if (way.to == Way::To::target && first_use[way.output].first == none) first_use[way.output] = {r, i};
    }
  std::vector<std::uint32_t> order(edges_.size()), place(edges_.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](std::uint32_t a, std::uint32_t b) {
    const auto &x = first_use[a], &y = first_use[b];
    return x.first != y.first ? x.first > y.first : x.second < y.second;
  });
  std::vector<std::uint32_t> ordered;
  for (std::uint32_t k = 0; k < order.size(); ++k) {
    place[order[k]] = k;
    ordered.push_back(edges_[order[k]]);
  }
  edges_ = std::move(ordered);
  for (std::uint32_t k = 0; k < edges_.size(); ++k) targets_[edges_[k]].edge = k;  // its last: whole there
  for (Recipe& recipe : recipes_)
    for (Way& way : recipe.ways)
      if (way.to == Way::To::target) way.output = place[way.output];
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
      check<StateError>(!tracer.is_blank(t.storage()),
                        "compile: output {} is memory that nothing was written to", outputs_.size() - 1);
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

/// Which outputs of the node others were computed of, so that a gradient there is more than what came to it.
void Frame::find_dependences() {
  depended_on_.assign(result_ways_.size(), false);
  std::vector<bool> computes(recipes_.size());  // an output
  for (const Way& way : result_ways_) computes[way.index] = true;
  for (std::size_t r = recipes_.size(); r-- > 0;)
    for (const Way& way : recipes_[r].ways) {
      if (!computes[r] || way.to != Way::To::node) continue;
      computes[way.index] = true;
      for (std::size_t k = 0; k < result_ways_.size(); ++k)
        if (result_ways_[k].index == way.index && result_ways_[k].output == way.output)
          depended_on_[k] = true;
    }
}

/// Replays note when they come to a mark. Coming back to it a backward is over all that was recorded behind.
void Frame::learn_marks(Recorded& recorded) {
  for (Effect& effect : recorded.effects) {
    if (effect.name.empty()) continue;
    marks_.push_back(effect.name);
    effect.again = [this, again = std::move(effect.again), bracket = effect.bracket,
                    undo = std::move(effect.undo)] {
      running_->marks.push_back(Context::current().slot<Tape>().take_sequence());
      again();
      begin_segment(*running_);
      if (bracket == Bracket::begins) begun_.push_back(&undo);  // the program holds it
      if (bracket == Bracket::ends) begun_.pop_back();
    };
  }
  std::vector<std::size_t> first_use(targets_.size(), none);  // marks before it
  for (const Recipe& recipe : recipes_)
    for (const Way& way : recipe.ways)
      if (way.to == Way::To::target) first_use[way.index] = std::min(first_use[way.index], recipe.marks);
  for (const std::size_t marks : first_use)
    leave_at_.push_back(marks == none || marks == 0 ? none : marks - 1);
}

/// What the backward reads of the forward's values, but for those that the user's regions make again.
std::vector<KeptValue> Frame::values_kept(const Tracer& tracer) const {
  std::vector<KeptValue> values;
  const auto reads = [](const Again& again, std::uint32_t k) {
    return std::ranges::any_of(again.outside, [&](const auto& read) { return read.second == k; });
  };
  for (std::uint32_t k = 0; k < kept_.size(); ++k) {
    if (kept_[k].region) continue;
    const std::uint32_t storage = kept_[k].outside ? tracer.index_of(*kept_[k].outside) : kept_[k].storage;
    const bool stays = std::ranges::any_of(regions_, [&](const Again& again) { return reads(again, k); });
    if (storage != TracedTensor::none) values.push_back({storage, k, stays});
  }
  return values;
}

/// Makes regions of what the backward makes again.
void Frame::keep_less(std::vector<MadeAgain> parts) {
  for (MadeAgain& part : parts) {
    const auto region = static_cast<std::uint32_t>(regions_.size());
    regions_.push_back({std::move(part.trace), std::move(part.read)});
    for (const auto& [index, number] : part.made) kept_[number] = {TracedTensor::none, {}, region, index};
  }
}

/// What the forward makes for the backward.
Cut Frame::cut_of_forward(const std::vector<KeptFrom>& kept) {
  Cut cut;
  for (std::uint32_t k = 0; k < kept.size(); ++k)
    if (kept[k].storage != TracedTensor::none) cut.made.emplace_back(kept[k].storage, k);
  return cut;
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
  find_dependences();
  found_ = std::move(tracer.found);
  Recorded recorded = tracer.take(inputs, results);
  call.marks = tracer.marks;
  learn_marks(recorded);
  for (std::size_t segment = 0; segment <= marks_.size() + 1; ++segment)
    begins_.push_back(static_cast<std::size_t>(
        std::ranges::lower_bound(recipes_, segment, {}, &Recipe::marks) - recipes_.begin()));
  for (const Ref<Node>& node : graph.nodes) places_.push_back(node->sequence);
  call.places = places_;
  begin_ = recorded.random_begin;
  end_ = recorded.random_end;
  kept_as_eager_ = kept_.size();
  regions_as_eager_ = regions_.size();
  call.as_eager = keeping_.budget.limited();
  if (call.as_eager) {
    to_fit_ = std::make_unique<ToFit>(ToFit{recorded, values_kept(tracer)});
  } else if (keeping_.keeps == Keeps::cheapest) {
    const Partitioning values(recorded, values_kept(tracer), MakesAgain::small, keeping_.costs);
    keep_less(values.made_again(values.cheapest(0)));
    for (std::size_t k = 0; k < kept_.size(); ++k)
      if (kept_[k].region) call.kept[k] = {};
  }
  recorded.cut = cut_of_forward(kept_);
  set_forward(program_of(std::move(recorded)));
}

void Frame::set_forward(std::unique_ptr<Program::Impl> program) {
  forward_ = std::move(program);
  forward_->place_now = [this](std::uint64_t traced) { return place_in_call(traced); };
}

std::vector<Tensor> Frame::trace(const std::vector<Tensor>& inputs,
                                 const std::function<std::vector<Tensor>()>& body, bool strict) {
  const std::uint64_t since = sequence_behind(inputs);
  const auto call = std::make_shared<FrameCall>(shared_from_this());
  call->start = Context::current().generator().state();
  std::vector<Tensor> outputs;
  std::vector<bool> wanted;
  for (const Tensor& t : inputs) wanted.push_back(wants_grad(t));
  Tracer tracer(inputs, strict, since);
  {
    const Listening listening(tracer);
    outputs = body();
  }
  tracer.attempt([&] {
    for (std::size_t i = 0; i < inputs.size(); ++i)
      check<StateError>(wants_grad(inputs[i]) == wanted[i],
                        "compile: whether an input of shape {} wants gradients changes inside",
                        inputs[i].shape());
    for (const Tracer::Set& set : tracer.set) set_inputs_.push_back(set.input);
    const Tracer::AsGiven given(tracer.set);
    std::vector<Tensor> all = outputs;
    for (const Tensor& t : given.shown) all.push_back(t);
    learn(tracer, inputs, all, since, *call);
  });
  hooks_ += tracer.marks.size();
  unfit_ = tracer.reason;
  check<StateError>(!strict || unfit_.empty(), "{}", unfit_);
  if (unfit_.empty()) {
    find_edges(*call, inputs);
    attach(call, outputs);
  }
  return outputs;
}

}  // namespace sherd
