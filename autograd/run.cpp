#include "autograd/run.h"

#include <algorithm>

#include "runtime/ops.h"

namespace sherd {
namespace {

struct RunState {
  Run* current = nullptr;
  std::uint64_t next = 1;
};
RunState& state() { return Context::current().slot<RunState>(); }

/// Nobody else can see this gradient, so it may be written or kept as it is.
bool owned_alone(const Tensor& t) {
  return t.impl()->use_count() == 1 && t.storage().use_count() == 1 && t.is_contiguous() &&
         !t.storage().owned();
}

void accumulate(Tensor& sum, Tensor gradient, bool recording) {
  if (!sum.defined())
    sum = std::move(gradient);
  else if (!recording && owned_alone(sum) && sum.dtype() == gradient.dtype())
    add_(sum, gradient);
  else
    sum = add(sum, gradient);
}

/// The default sink.
void add_to_grad(Leaf& leaf, Tensor gradient, bool recording) {
  if (!leaf.grad.defined())
    leaf.grad = recording || owned_alone(gradient) ? std::move(gradient) : clone(gradient);
  else if (recording)
    leaf.grad = add(leaf.grad, gradient);
  else
    add_(leaf.grad, gradient);
}

Tensor with_history(const SavedTensor& saved, const Edge& edge) {
  Tensor t(make_ref<TensorImpl>(saved.value.storage_ref(), saved.value.layout(), saved.value.dtype()));
  AutogradRecord& record = ensure_record(t);
  record.requires_grad = true;
  record.edge = edge;
  return t;
}

void check_unchanged(const Node& node, const SavedTensor& saved, std::string_view what, std::size_t i) {
  check<StateError>(saved.value.storage().version() == saved.version,
                    "backward of {}: {} {} of shape {} was changed in place after it was recorded (version "
                    "{}, now {}); change a "
                    "clone of it instead",
                    node.op->name(), what, i, saved.value.shape(), saved.version,
                    saved.value.storage().version());
}

}  // namespace

Run*& current_run() { return state().current; }

Run::Run(BackwardOptions options) : options_(options), info_{state().next++}, outer_(state().current) {
  options_.retain_graph = options_.retain_graph || options_.create_graph;
  state().current = this;
}

Run::~Run() {
  for (Place& place : places_) place.node->run = nullptr;
  for (LeafPlace& place : leaves_) place.leaf->run = nullptr;
  state().current = outer_;
}

void Run::seed(const Tensor& output, Tensor gradient) {
  const AutogradRecord* record = record_of(output);
  check<StateError>(record != nullptr && record->requires_grad,
                    "backward: a tensor of shape {} does not depend on anything that requires grad",
                    output.shape());
  if (!gradient.defined()) {
    check<ShapeError>(output.numel() == 1,
                      "backward: a tensor of shape {} needs an upstream gradient of its own shape (only one "
                      "element has an implied one)",
                      output.shape());
    gradient = ones(output.shape(), {output.dtype(), output.device()});
  }
  check<ShapeError>(gradient.shape() == output.shape(),
                    "backward: upstream gradient has shape {}, the tensor {}", gradient.shape(),
                    output.shape());
  check<DTypeError>(gradient.dtype() == output.dtype(), "backward: upstream gradient is {}, the tensor {}",
                    name_of(gradient.dtype()), name_of(output.dtype()));
  seeds_.emplace_back(record->edge, std::move(gradient));
}

void Run::collect() {
  std::vector<Node*> stack;
  const auto meet = [&](const Edge& edge) {
    if (stop_at(edge) != nullptr) return;
    if (edge.leaf) {
      if (edge.leaf->run != this) {
        check<StateError>(edge.leaf->run == nullptr,
                          "backward: a backward inside a backward reaches the same leaf '{}'; finish "
                          "the outer one first",
                          edge.leaf->name);
        edge.leaf->run = this;
        edge.leaf->slot = static_cast<std::uint32_t>(leaves_.size());
        leaves_.push_back({edge.leaf, {}, 0});
      }
      ++leaves_[edge.leaf->slot].due;
    } else if (edge.node && edge.node->run != this) {
      check<StateError>(edge.node->run == nullptr,
                        "backward: a backward inside a backward reaches the same {} node; finish the "
                        "outer one first",
                        edge.node->op->name());
      edge.node->run = this;
      places_.push_back({edge.node, {}, true});
      stack.push_back(edge.node.get());
    }
  };
  for (const auto& [edge, gradient] : seeds_) meet(edge);
  while (!stack.empty()) {
    const Node* node = stack.back();
    stack.pop_back();
    check<StateError>(
        !node->freed,
        "backward: the graph behind {} was freed by an earlier backward; pass retain_graph to that "
        "one, or run the forward again",
        node->op->name());
    for (const Edge& edge : node->edges) meet(edge);
  }
  std::sort(places_.begin(), places_.end(),
            [](const Place& a, const Place& b) { return a.node->sequence > b.node->sequence; });
  for (std::size_t i = 0; i < places_.size(); ++i) {
    places_[i].node->slot = static_cast<std::uint32_t>(i);
    places_[i].gradients.resize(places_[i].node->outputs.size());
  }
}

void Run::announce() {
  for (const Place& place : places_) {
    const auto expect = [](const SavedTensor& saved) {
      if (saved.value.defined() && saved.value.storage().owned())
        saved.value.storage().owner()->expect_reads(saved.value.storage(), 1);
    };
    for (const SavedTensor& saved : place.node->saved_inputs) expect(saved);
    for (const SavedTensor& saved : place.node->saved_outputs) expect(saved);
  }
  if (!feeding_) return;
  for (const LeafPlace& place : leaves_) {
    const std::shared_ptr<GradSink>& sink = place.leaf->sink;
    if (!sink) continue;
    if (std::find(sinks_.begin(), sinks_.end(), sink) == sinks_.end()) sinks_.push_back(sink);
    sink->begin(info_, *place.leaf);
  }
}

/// Nodes from which no wanted input can be reached are not run.
void Run::prune(std::span<const Tensor> inputs) {
  for (Place& place : places_) place.useful = false;
  const auto wanted = [&](const Edge& edge) {
    if (edge.node) return edge.node->run == this && places_[edge.node->slot].useful;
    return edge.leaf && std::any_of(inputs.begin(), inputs.end(), [&](const Tensor& t) {
             const AutogradRecord* record = record_of(t);
             return record != nullptr && record->edge.leaf == edge.leaf;
           });
  };
  std::vector<const Node*> stops;
  for (const Tensor& t : inputs)
    if (const AutogradRecord* record = record_of(t); record != nullptr && record->edge.node)
      stops.push_back(record->edge.node.get());
  for (std::size_t i = places_.size(); i-- > 0;) {
    for (const Edge& edge : places_[i].node->edges) {
      const bool stop = edge.node && std::find(stops.begin(), stops.end(), edge.node.get()) != stops.end();
      places_[i].useful = places_[i].useful || stop || wanted(edge);
    }
  }
}

void Run::backward() {
  try {
    collect();
    announce();
    walk();
    for (const auto& sink : sinks_) sink->finish(info_);
    for (std::size_t i = 0; i < callbacks_.size(); ++i) callbacks_[i]();
  } catch (...) {
    abort();
    throw;
  }
}

std::vector<Tensor> Run::grad(std::span<const Tensor> inputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i)
    check<StateError>(wants_grad(inputs[i]), "grad: input {} of shape {} does not require grad", i,
                      inputs[i].shape());
  feeding_ = false;
  std::vector<Tensor> result(inputs.size());
  try {
    collect();
    prune(inputs);
    announce();
    caught_.resize(places_.size());
    walk();
    run_leaf_hooks(inputs);
  } catch (...) {
    abort();
    throw;
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Edge& edge = record_of(inputs[i])->edge;
    if (edge.leaf && edge.leaf->run == this) result[i] = leaves_[edge.leaf->slot].gradient;
    if (edge.node && edge.node->run == this && edge.index < caught_[edge.node->slot].size())
      result[i] = caught_[edge.node->slot][edge.index];
  }
  return result;
}

void Run::run_leaf_hooks(std::span<const Tensor> inputs) {
  const GradMode mode(options_.create_graph);
  for (LeafPlace& place : leaves_) {
    if (!place.leaf->hooks || !place.gradient.defined()) continue;
    const bool wanted = std::any_of(inputs.begin(), inputs.end(),
                                    [&](const Tensor& t) { return record_of(t)->edge.leaf == place.leaf; });
    if (wanted) place.gradient = place.leaf->hooks->run(std::move(place.gradient));
  }
}

Run::Stop* Run::stop_at(const Edge& edge) {
  for (Stop& stop : stops_)
    if (stop.edge.leaf == edge.leaf && stop.edge.node == edge.node && stop.edge.index == edge.index)
      return &stop;
  return nullptr;
}

std::vector<Tensor> Run::partial(std::span<const Tensor> inputs) {
  feeding_ = false;
  for (const Tensor& t : inputs) stops_.push_back({record_of(t)->edge, {}});
  try {
    collect();
    announce();
    walk();
  } catch (...) {
    abort();
    throw;
  }
  std::vector<Tensor> result;
  // A tensor passed twice gets its whole gradient once.
  for (Stop& stop : stops_) result.push_back(stop_at(stop.edge) == &stop ? stop.gradient : Tensor{});
  return result;
}

void Run::walk() {
  const GradMode mode(options_.create_graph);
  for (auto& [edge, gradient] : seeds_) {
    if (Stop* stop = stop_at(edge))
      accumulate(stop->gradient, std::move(gradient), options_.create_graph);
    else if (edge.node)
      accumulate(places_[edge.node->slot].gradients[edge.index], std::move(gradient), options_.create_graph);
    else
      accumulate(leaves_[edge.leaf->slot].gradient, std::move(gradient), options_.create_graph);
  }
  for (auto& [edge, gradient] : seeds_) settle(edge);
  for (next_ = 0; next_ < places_.size(); ++next_) visit(places_[next_]);
}

void Run::visit(Place& place) {
  Node& node = *place.node;
  bool any = false;
  for (std::size_t i = 0; i < place.gradients.size(); ++i) {
    Tensor& gradient = place.gradients[i];
    if (!gradient.defined()) continue;
    any = true;
    if (i < node.hooks.size() && node.hooks[i]) gradient = node.hooks[i]->run(std::move(gradient));
  }
  if (!caught_.empty()) caught_[node.slot].assign(place.gradients.begin(), place.gradients.end());
  Tensors gradients;
  if (any && place.useful) gradients = gradients_of(place);
  place.gradients.clear();
  for (std::size_t i = 0; i < gradients.size() && i < node.edges.size(); ++i)
    if (gradients[i].defined() && node.edges[i]) deliver(node.edges[i], std::move(gradients[i]), node, i);
  reads_over(node);
  for (const Edge& edge : node.edges) settle(edge);
  if (!options_.retain_graph && place.useful) node.free();
}

Tensors Run::gradients_of(Place& place) {
  Node& node = *place.node;
  Tensors inputs(node.saved_inputs.size()), outputs(node.saved_outputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const SavedTensor& saved = node.saved_inputs[i];
    if (!saved.value.defined()) continue;
    check_unchanged(node, saved, "input", i);
    inputs[i] = options_.create_graph && node.edges[i] ? with_history(saved, node.edges[i]) : saved.value;
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const SavedTensor& saved = node.saved_outputs[i];
    if (!saved.value.defined()) continue;
    check_unchanged(node, saved, "output", i);
    outputs[i] = options_.create_graph
                     ? with_history(saved, {Ref<Node>(&node), static_cast<std::uint32_t>(i), {}})
                     : saved.value;
  }
  return node.op->grad({place.gradients, inputs, outputs, node.specs, node.needs, options_.create_graph});
}

void Run::deliver(const Edge& edge, Tensor gradient, const Node& from, std::size_t input) {
  const Spec& spec = from.specs[input];
  check<ShapeError>(gradient.shape() == spec.shape,
                    "backward of {}: gradient of input {} has shape {}, the input {}", from.op->name(), input,
                    gradient.shape(), spec.shape);
  check<DTypeError>(gradient.dtype() == spec.dtype,
                    "backward of {}: gradient of input {} is {}, the input {}", from.op->name(), input,
                    name_of(gradient.dtype()), name_of(spec.dtype));
  Stop* stop = stop_at(edge);
  Tensor& sum = stop != nullptr ? stop->gradient
                : edge.node     ? places_[edge.node->slot].gradients[edge.index]
                                : leaves_[edge.leaf->slot].gradient;
  accumulate(sum, std::move(gradient), options_.create_graph);
}

/// An edge into a leaf has delivered, or never will; after the last one the sum is complete.
void Run::settle(const Edge& edge) {
  if (!edge.leaf || stop_at(edge) != nullptr) return;
  LeafPlace& place = leaves_[edge.leaf->slot];
  if (--place.due == 0 && feeding_ && place.gradient.defined()) hand_over(place);
}

void Run::hand_over(LeafPlace& place) {
  Leaf& leaf = *place.leaf;
  Tensor gradient = std::move(place.gradient);
  if (leaf.hooks) gradient = leaf.hooks->run(std::move(gradient));
  if (leaf.sink)
    leaf.sink->accept(info_, leaf, std::move(gradient));
  else
    add_to_grad(leaf, std::move(gradient), options_.create_graph);
  if (const auto hooks = leaf.after_accumulate) {
    const std::size_t count = hooks->size();
    for (std::size_t i = 0; i < count; ++i)
      if (const auto hook = (*hooks)[i]) hook(leaf);
  }
}

void Run::reads_over(const Node& node) {
  const auto over = [](const SavedTensor& saved) {
    if (saved.value.defined() && saved.value.storage().owned()) {
      const Ref<Storage> storage = saved.value.storage_ref();
      storage->owner()->read_done(*storage);
    }
  };
  for (const SavedTensor& saved : node.saved_inputs) over(saved);
  for (const SavedTensor& saved : node.saved_outputs) over(saved);
}

void Run::abort() noexcept {
  for (const auto& sink : sinks_) sink->abort(info_);
  for (std::size_t i = next_; i < places_.size(); ++i) {
    const auto forget = [](const SavedTensor& saved) {
      if (saved.value.defined() && saved.value.storage().owned())
        saved.value.storage().owner()->forget_reads(saved.value.storage());
    };
    for (const SavedTensor& saved : places_[i].node->saved_inputs) forget(saved);
    for (const SavedTensor& saved : places_[i].node->saved_outputs) forget(saved);
  }
}

}  // namespace sherd
