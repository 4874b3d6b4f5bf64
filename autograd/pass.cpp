#include "autograd/pass.h"

#include <algorithm>
#include <atomic>

#include "autograd/capture/effects.h"
#include "autograd/tape.h"
#include "runtime/ops.h"
#include "runtime/timeline.h"

namespace sherd {
namespace {

/// Whether this handle is the only one on its memory, which may then be written or kept as it is.
bool owned_alone(const Tensor& t) {
  return t.impl()->use_count() == 1 && t.storage().use_count() == 1 && t.is_contiguous() &&
         !t.storage().owned() && !t.storage().borrowed();
}

/// Whether a node that is about to be freed is the last to hold the memory of a value that it kept.
bool is_spare(const Tensor& kept) {
  return kept.storage().use_count() == 1 && kept.is_contiguous() && !kept.storage().owned() &&
         !kept.storage().borrowed();
}

/// The gradient as a tensor that only its new owner sees, and that keeps no more memory than it fills.
Tensor own(Tensor gradient) {
  const auto bytes = static_cast<std::size_t>(gradient.numel() * size_of(gradient.dtype()));
  return owned_alone(gradient) && gradient.storage().bytes() == bytes ? gradient : clone(gradient);
}

/// A leaf that is read in several dtypes gets gradients in each; the sum's holds any.
DType sum_dtype(DType a, DType b) {
  if (a == b) return a;
  return size_of(a) == size_of(b) ? DType::f32 : size_of(a) > size_of(b) ? a : b;
}

void accumulate(Tensor& sum, Tensor gradient, bool recording) {
  if (!sum.defined()) {
    sum = std::move(gradient);
    return;
  }
  if (!recording && owned_alone(sum) && sum.dtype() == gradient.dtype()) {
    add_(sum, gradient);
    return;
  }
  const DType dtype = sum_dtype(sum.dtype(), gradient.dtype());
  sum = add(to(sum, dtype), to(gradient, dtype));
}

bool fits(const Tensor& gradient, const Spec& spec) {
  return gradient.shape() == spec.shape && gradient.dtype() == spec.dtype && gradient.device() == spec.device;
}

/// Throws for the difference between `gradient`, called `what`, and `spec`, which belongs to `whose`.
[[noreturn]] void refuse(std::string_view call, std::string_view what, const Tensor& gradient,
                         std::string_view whose, const Spec& spec) {
  check<ShapeError>(gradient.shape() == spec.shape, "{}: {} has shape {}, {} {}", call, what,
                    gradient.shape(), whose, spec.shape);
  check<DTypeError>(gradient.dtype() == spec.dtype, "{}: {} is {}, {} {}", call, what,
                    name_of(gradient.dtype()), whose, name_of(spec.dtype));
  fail<DeviceError>("{}: {} is on {}, {} on {}", call, what, gradient.device(), whose, spec.device);
}

/// The gradient after the hooks of `whose`, in order.
Tensor through_hooks(const Subscribers<GradHook>& hooks, Tensor gradient, std::string_view whose) {
  hooks.each([&](const GradHook& hook) {
    const std::uint32_t version = gradient.storage().version();
    Tensor other = hook(gradient);
    check<StateError>(
        gradient.storage().version() == version || owned_alone(gradient),
        "register_hook: a hook of {} wrote the gradient of shape {} that it was given, and others "
        "use it; return a new tensor instead",
        whose, gradient.shape());
    if (!other.defined()) return;
    if (!fits(other, gradient.spec()))
      refuse("register_hook", fmt::format("what a hook of {} returned", whose), other,
             "the gradient in whose place it goes", gradient.spec());
    gradient = std::move(other);
  });
  return gradient;
}

std::string_view title(const Leaf& leaf) {
  return leaf.name.empty() ? std::string_view("a leaf") : std::string_view(leaf.name);
}

/// What a leaf without a sink does with its gradient.
void add_to_grad(Leaf& leaf, Tensor gradient, bool recording) {
  if (!leaf.grad.defined()) {
    leaf.grad = own(std::move(gradient));
    return;
  }
  if (!fits(gradient, leaf.grad.spec()))
    refuse("backward", fmt::format("the gradient of {}", title(leaf)), gradient,
           "its .grad, to which it is to be added,", leaf.grad.spec());
  if (recording)
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
  if (saved.value.numel() == 0) return;
  check<StateError>(saved.value.storage().version() == saved.version,
                    "backward of {}: {} {} of shape {} was changed in place after it was recorded (version "
                    "{}, now {}); change a "
                    "clone of it instead",
                    node.op->name(), what, i, saved.value.shape(), saved.version,
                    saved.value.storage().version());
}

/// Whether a later edge of the node goes to the same leaf.
bool met_again(const Node& node, std::size_t edge) {
  const auto later = std::span(node.edges.begin(), node.edges.size()).subspan(edge + 1);
  return std::ranges::any_of(later, [&](const Edge& e) { return e.leaf == node.edges[edge].leaf; });
}

/// The pass that holds a node or leaf. Graphs on two threads may share leaves, so this is read and taken
/// atomically; `slot` is valid for the holder only.
template <class NodeOrLeaf>
std::atomic_ref<const void*> pass_of(NodeOrLeaf& held) {
  return std::atomic_ref<const void*>(held.pass);
}

/// Takes a node or leaf for `pass`; false if `pass` holds it already, StateError if another does.
template <class NodeOrLeaf>
bool claim(NodeOrLeaf& held, const BackwardPass* pass, std::string_view call, std::string_view name) {
  const void* holder = nullptr;
  if (pass_of(held).compare_exchange_strong(holder, pass, std::memory_order_acq_rel)) return true;
  check<StateError>(holder == pass,
                    "{}: {} is in a backward that is under way, around this one or on another thread; finish "
                    "that one first (ranks that are threads each make a model of their own)",
                    call, name);
  return false;
}

/// Calls `on` for every value with an owner that the node keeps.
template <class F>
void each_owned(const Node& node, F&& on) {
  const auto look = [&](const SavedTensor& saved) {
    if (saved.value.defined() && saved.value.storage().owned()) on(saved.value.storage_ref());
  };
  for (const SavedTensor& saved : node.saved_inputs) look(saved);
  for (const SavedTensor& saved : node.saved_outputs) look(saved);
}

}  // namespace

PassState& pass_state() { return Context::current().slot<PassState>(); }

BackwardPass::BackwardPass(std::string_view call, BackwardOptions options)
    : call_(call),
      options_(options),
      state_(pass_state()),
      outer_(std::exchange(state_.innermost, this)),
      outer_place_(state_.place) {
  info_.number = state_.next_number++;
  options_.retain_graph = options_.retain_graph || options_.create_graph;
}

BackwardPass::~BackwardPass() {
  for (Place& place : places_) pass_of(*place.node).store(nullptr, std::memory_order_release);
  for (LeafPlace& place : leaves_) pass_of(*place.leaf).store(nullptr, std::memory_order_release);
  state_.innermost = outer_;
  state_.place = outer_place_;
}

void BackwardPass::seed(const Edge& edge, Tensor gradient) { seeds_.emplace_back(edge, std::move(gradient)); }

/// The edge past nodes that stand for many, where the pass goes through what they stand for: one that is
/// recorded does, so that what it records leads there, at the places where it was recorded.
Edge BackwardPass::looked_through(const Edge& edge) const {
  for (Edge at = followed(edge);; at = followed(std::move(at))) {
    Node* const node = at.node.get();
    if (!options_.create_graph || node == nullptr || !node->folded || node->freed || leaves(at)) return at;
    if (pass_of(*node) != nullptr) return at;  // of a pass that is under way, as `claim` says
    node->folded->unfold(*node);
  }
}

void BackwardPass::seed(const Tensor& output, Tensor gradient) {
  check<ValueError>(output.defined(), "{}: output {} is an empty handle", call_, seeds_.size());
  const AutogradRecord* record = record_of(output);
  check<StateError>(record != nullptr && record->requires_grad,
                    "{}: a tensor of shape {} does not depend on anything that requires grad", call_,
                    output.shape());
  check_fresh_view(call_, output);
  if (!gradient.defined()) {
    check<ShapeError>(
        output.numel() == 1,
        "{}: a tensor of shape {} needs an upstream gradient of its own shape (only one element "
        "has an implied one)",
        call_, output.shape());
    gradient = ones(output.shape(), {output.dtype(), output.device()});
  }
  if (!fits(gradient, output.spec()))
    refuse(call_, "upstream gradient", gradient, "the tensor", output.spec());
  seed(record->edge, std::move(gradient));
}

void BackwardPass::collect() {
  std::vector<Node*> stack;
  const auto meet = [&](const Edge& edge, DType dtype) {
    if (stops_at(edge) || leaves(edge)) return;
    if (edge.leaf) {
      if (claim(*edge.leaf, this, call_, title(*edge.leaf))) {
        leaves_.push_back({edge.leaf});
        edge.leaf->slot = static_cast<std::uint32_t>(leaves_.size() - 1);
      }
      LeafPlace& place = leaves_[edge.leaf->slot];
      ++place.due;
      if (size_of(dtype) == 2) ++place.uses_in_16_bits;
    } else if (edge.node && claim(*edge.node, this, call_, edge.node->op->name())) {
      places_.push_back({edge.node, {}});
      stack.push_back(edge.node.get());
    }
  };
  for (auto& [edge, gradient] : seeds_) {
    edge = looked_through(edge);
    meet(edge, gradient.dtype());
  }
  while (!stack.empty()) {
    Node* node = stack.back();
    stack.pop_back();
    if (node->freed) continue;  // `check_alive` throws if a wanted gradient depends on what lay behind
    for (std::size_t i = 0; i < node->edges.size(); ++i) {
      if (node->edges[i].node && node->edges[i].node->folded) node->edges[i] = looked_through(node->edges[i]);
      meet(node->edges[i], node->specs[i].dtype);
    }
  }
  std::sort(places_.begin(), places_.end(),
            [](const Place& a, const Place& b) { return a.node->sequence > b.node->sequence; });
  for (std::size_t i = 0; i < places_.size(); ++i) {
    places_[i].node->slot = static_cast<std::uint32_t>(i);
    places_[i].gradients.resize(places_[i].node->outputs.size());
  }
}

/// StateError when a wanted gradient may lie behind a node that was freed, whose edges are gone.
void BackwardPass::check_alive() const {
  const bool all_found = std::all_of(targets_.begin(), targets_.end(), [&](const Target& target) {
    const Edge& edge = target.edge;
    return stopping_ || (edge.leaf ? pass_of(*edge.leaf) == this : pass_of(*edge.node) == this);
  });
  for (const Place& place : places_)
    check<StateError>(
        !place.node->freed || (!targets_.empty() && all_found && !place.useful),
        "{}: the graph behind {} was freed by an earlier backward; pass retain_graph to that one, or run the "
        "forward again",
        call_, place.node->op->name());
}

void BackwardPass::add_target(const Edge& input) {
  const Edge edge = looked_through(input);
  Target* known = target_at(edge);
  target_of_.push_back(known != nullptr ? static_cast<std::size_t>(known - targets_.data())
                                        : targets_.size());
  if (known == nullptr) targets_.push_back({edge, {}});
}

BackwardPass::Target* BackwardPass::target_at(const Edge& edge) {
  for (Target& target : targets_)
    if (target.edge.leaf == edge.leaf && target.edge.node == edge.node && target.edge.index == edge.index)
      return &target;
  return nullptr;
}

/// Whether what flows along an edge leads to something that is asked for.
bool BackwardPass::wanted(const Edge& edge) {
  if (!edge) return false;
  if (stops_at(edge)) return true;
  if (leaves(edge)) return false;
  if (edge.leaf) return leaves_[edge.leaf->slot].asked_for;
  const Place& place = places_[edge.node->slot];
  return place.useful || (place.asked_for && target_at(edge) != nullptr);
}

/// Marks nodes on which no target depends: their rules are not run.
void BackwardPass::prune() {
  for (LeafPlace& place : leaves_) place.asked_for = false;
  for (const Target& target : targets_) {
    const Edge& edge = target.edge;
    if (edge.leaf && pass_of(*edge.leaf) == this) leaves_[edge.leaf->slot].asked_for = true;
    if (edge.node && pass_of(*edge.node) == this) places_[edge.node->slot].asked_for = true;
  }
  for (std::size_t i = places_.size(); i-- > 0;) {
    const auto& edges = places_[i].node->edges;
    places_[i].useful = std::any_of(edges.begin(), edges.end(), [&](const Edge& e) { return wanted(e); });
  }
}

/// Whether gradients inside a compiled call meet behind its inputs depends on the call, as its program does
/// not.
void BackwardPass::check_frame() {
  const std::uint64_t begin = begin_of_frame();
  if (begin == 0 || stopping_) return;
  const auto leads_out = [&](const Edge& edge) {
    return edge.node && edge.node->sequence < begin && target_at(edge) == nullptr;
  };
  for (const Place& place : places_)
    if (place.node->sequence >= begin && std::ranges::any_of(place.node->edges, leads_out))
      return refuse_in_frames(
          "compile: a backward inside may go through what an input was computed by; pass it detached");
}

void BackwardPass::announce() {
  announced_ = true;
  check_frame();
  for (const Place& place : places_)
    if (place.useful)
      each_owned(*place.node,
                 [](const Ref<Storage>& storage) { storage->owner()->expect_reads(*storage, 1); });
  if (!feeding_) return;
  for (const LeafPlace& place : leaves_) {
    const std::shared_ptr<GradSink>& sink = place.leaf->sink;
    if (!sink) continue;
    if (std::find(sinks_.begin(), sinks_.end(), sink) == sinks_.end()) sinks_.push_back(sink);
    sink->begin(info_, *place.leaf);
  }
  for (const auto& sink : sinks_) sink->begun(info_);
}

void BackwardPass::backward() {
  const MemoryScope held(MemoryUse::gradients);
  const TimelineSlice slice("backward", call_);
  try {
    collect();
    check_alive();
    announce();
    walk();
    for (const auto& sink : sinks_) sink->finish(info_);
    call_back();
  } catch (...) {
    abort();
    throw;
  }
}

/// Computes the gradients of the targets and gives nothing to sinks or `.grad`.
void BackwardPass::differentiate() {
  feeding_ = false;
  collect();
  prune();
  check_alive();
  announce();
  walk();
}

std::vector<Tensor> BackwardPass::grad(std::span<const Tensor> inputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check<ValueError>(inputs[i].defined(), "grad: input {} is an empty handle", i);
    check<StateError>(wants_grad(inputs[i]), "grad: input {} of shape {} does not require grad", i,
                      inputs[i].shape());
    check_fresh_view("grad", inputs[i]);
  }
  const MemoryScope held(MemoryUse::gradients);
  const TimelineSlice slice("backward", call_);
  try {
    for (const Tensor& t : inputs) where_whole(record_of(t)->edge);  // before any of them is a target
    for (const Tensor& t : inputs) add_target(record_of(t)->edge);
    differentiate();
    std::vector<Tensor> results = take_results();
    call_back();
    return results;
  } catch (...) {
    abort();
    throw;
  }
}

/// One tensor an input, each in memory of its own.
std::vector<Tensor> BackwardPass::take_results() {
  const GradMode mode(options_.create_graph);
  for (Target& target : targets_) {
    const Ref<Leaf>& leaf = target.edge.leaf;
    if (!leaf || pass_of(*leaf) != this) continue;
    Tensor sum = whole(leaves_[leaf->slot]);
    if (sum.defined()) target.gradient = through_hooks(leaf->hooks, std::move(sum), title(*leaf));
  }
  for (Target& target : targets_)
    if (target.gradient.defined()) target.gradient = own(std::move(target.gradient));
  std::vector<Tensor> results;
  std::vector<bool> given(targets_.size());
  for (const std::size_t at : target_of_) {
    const Tensor& gradient = targets_[at].gradient;
    results.push_back(given[at] && gradient.defined() ? clone(gradient) : gradient);
    given[at] = true;
  }
  return results;
}

std::vector<Tensor> BackwardPass::partial(std::span<const Tensor> inputs, std::uint64_t since) {
  std::vector<Asked> asked;
  for (const Tensor& t : inputs) asked.push_back({record_of(t)->edge});
  return partial(asked, since);
}

std::vector<Tensor> BackwardPass::partial(std::span<const Asked> asked, std::uint64_t since) {
  stopping_ = true;
  since_ = since;
  try {
    for (const Asked& each : asked) {
      add_target(each.edge);
      Target& target = targets_[target_of_.back()];
      if (each.so_far.defined()) target.gradient = each.so_far;
      target.in_f32 = target.in_f32 || each.in_f32;
    }
    differentiate();
    call_back();
  } catch (...) {
    abort();
    throw;
  }
  // A tensor passed twice gets its whole gradient once.
  std::vector<Tensor> results;
  for (const std::size_t at : target_of_) results.push_back(std::exchange(targets_[at].gradient, {}));
  return results;
}

/// The sum to which a gradient in `dtype` along `edge` is added, or null where nobody asks for it.
Tensor* BackwardPass::sum_at(const Edge& edge, DType dtype) {
  if (!wanted(edge)) return nullptr;
  if (stopping_)
    if (Target* target = target_at(edge)) return &target->gradient;
  if (edge.node) return &places_[edge.node->slot].gradients[edge.index];
  LeafPlace& place = leaves_[edge.leaf->slot];
  const bool first = !place.sum.value.defined() || place.sum.dtype == dtype;
  LeafSum& sum = first ? place.sum : place.in_other_dtype;
  if (!sum.value.defined()) sum.dtype = dtype;
  return &sum.value;
}

/// Of two in 16 bits the sum is rounded once anyway.
bool BackwardPass::summed_in_f32(const Edge& edge, DType dtype) {
  if (!edge.leaf || size_of(dtype) != 2) return false;
  if (!stopping_) return leaves_[edge.leaf->slot].uses_in_16_bits > 2;
  const Target* target = target_at(edge);
  return target != nullptr && target->in_f32;
}

/// Adds what came along `edge`, of a value in `dtype`, to `sum`, which `sum_at` gave for it.
void BackwardPass::add(const Edge& edge, DType dtype, Tensor& sum, Tensor gradient) {
  if (sum.defined() && summed_in_f32(edge, dtype)) {
    sum = to(sum, DType::f32);
    gradient = to(gradient, DType::f32);
  }
  accumulate(sum, std::move(gradient), options_.create_graph);
}

/// All that came to a leaf, which the place no longer has.
Tensor BackwardPass::whole(LeafPlace& place) {
  const auto rounded = [](LeafSum& sum) {
    const Tensor value = std::exchange(sum.value, {});
    return value.defined() && size_of(sum.dtype) == 2 ? to(value, sum.dtype) : value;
  };
  Tensor total = rounded(place.sum);
  if (Tensor other = rounded(place.in_other_dtype); other.defined())
    accumulate(total, std::move(other), options_.create_graph);
  return total;
}

void BackwardPass::walk() {
  const GradMode mode(options_.create_graph);
  for (auto& [edge, gradient] : seeds_) {
    Tensor given = std::move(gradient);
    const DType dtype = given.dtype();
    if (Tensor* sum = sum_at(edge, dtype)) add(edge, dtype, *sum, std::move(given));
  }
  for (auto& [edge, gradient] : seeds_) settle(edge);
  for (Place& place : places_) look_beside(place);
  for (next_ = 0; next_ < places_.size(); ++next_) visit(places_[next_]);
  pass_place(0);
}

/// Tells who watches, once for each of the leaves that were made since the node before, and for `place`.
void BackwardPass::pass_place(std::uint64_t place) {
  const auto tell = [this](std::uint64_t at) {
    if (at < watched_below_) watched_below_ = passing_(at);
  };
  while (!hooked_.empty() && hooked_.back()->leaf->place >= place) {
    LeafPlace& leaf = *hooked_.back();
    hooked_.pop_back();
    tell(leaf.leaf->place);
    hand_over(leaf);
  }
  if (place > 0) tell(place);
}

void BackwardPass::visit(Place& place) {
  Node& node = *place.node;
  if (feeding_) state_.place = node.sequence;
  pass_place(node.sequence);
  pass_hooks(place);
  if (place.useful) {
    const bool any = std::any_of(place.gradients.begin(), place.gradients.end(),
                                 [](const Tensor& gradient) { return gradient.defined(); });
    const Tensors so_far = any ? sums_so_far(place) : Tensors();
    so_far_ = {so_far.begin(), so_far.size()};
    Tensors gradients;
    Tensor sums;
    if (any) gradients = gradients_of(place, so_far, place.summed != none ? &sums : nullptr);
    place.gradients.clear();
    for (std::size_t i = 0; i < gradients.size() && i < node.edges.size(); ++i)
      if (gradients[i].defined() && node.edges[i])
        deliver(node.edges[i], std::move(gradients[i]), node, i, i < so_far.size() && so_far[i].defined(),
                i == place.summed ? std::move(sums) : Tensor());
    reads_over(node);
  }
  place.gradients.clear();
  for (std::size_t i = 0; i < node.edges.size(); ++i)
    if (i >= handed_.size() || !handed_[i]) settle(node.edges[i]);
  handed_.clear();
  if (!options_.retain_graph && place.useful) node.free();
}

void BackwardPass::hand(std::size_t input, Tensor gradient) {
  const Node& node = *places_[next_].node;
  const bool whole = input < so_far_.size() && so_far_[input].defined();
  if (gradient.defined()) deliver(node.edges[input], std::move(gradient), node, input, whole, {});
  handed_.resize(node.edges.size());
  handed_[input] = true;
  settle(node.edges[input]);
}

/// Runs hooks on a node's gradients, which are complete now, and gives the results to targets.
void BackwardPass::pass_hooks(Place& place) {
  Node& node = *place.node;
  for (std::size_t i = 0; i < place.gradients.size() && i < node.hooks.size(); ++i)
    if (place.gradients[i].defined() && !node.hooks[i].empty()) {
      place.gradients[i] = through_hooks(node.hooks[i], std::move(place.gradients[i]), node.op->name());
      place.sums = {};  // a hook may give another gradient
    }
  if (!place.asked_for) return;
  for (Target& target : targets_)
    if (target.edge.node == place.node) target.gradient = place.gradients[target.edge.index];
}

/// What the place's rule and those at the ends of its edges can save each other.
void BackwardPass::look_beside(Place& place) {
  const Node& node = *place.node;
  place.peephole = place.useful ? node.op->peephole() : nullptr;
  if (place.peephole == nullptr) return;
  for (std::size_t i = 0; i < node.edges.size() && place.summed == none; ++i)
    if (has(place.peephole->gives_sums, i) && takes_sums(node.edges[i])) place.summed = i;
}

/// What has arrived for the inputs whose sums the rule makes itself; empty where it makes none.
Tensors BackwardPass::sums_so_far(const Place& place) {
  const Node& node = *place.node;
  Tensors sums;
  if (options_.create_graph || place.peephole == nullptr) return sums;
  for (std::size_t i = 0; i < node.edges.size(); ++i) {
    if (!has(place.peephole->adds_gradients, i)) continue;
    const DType dtype = node.specs[i].dtype;
    const Tensor* sum = sum_at(node.edges[i], dtype);
    if (sum == nullptr || !sum->defined()) continue;
    const bool in_f32 = summed_in_f32(node.edges[i], dtype);
    if (in_f32 ? !place.peephole->of_several || met_again(node, i) : sum->dtype() != dtype) continue;
    sums.resize(node.edges.size());
    sums[i] = *sum;
  }
  return sums;
}

/// Whether the rule at the end of an edge reads sums of its gradient.
bool BackwardPass::takes_sums(const Edge& edge) {
  if (options_.create_graph || !edge.node || edge.index != 0 || !wanted(edge) || stops_at(edge)) return false;
  Mask needs = 0;
  for (std::size_t i = 0; i < edge.node->edges.size() && i < 64; ++i)
    if (wanted(edge.node->edges[i])) needs |= bit(i);
  const Peephole* there = edge.node->op->peephole();
  return there != nullptr && (there->takes_sums & needs) != 0;
}

Tensors BackwardPass::gradients_of(Place& place, Inputs so_far, Tensor* sums) {
  Node& node = *place.node;
  Tensors inputs(node.saved_inputs.size()), outputs(node.saved_outputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const SavedTensor& saved = node.saved_inputs[i];
    if (!saved.value.defined()) continue;
    check_unchanged(node, saved, "input", i);
    const bool has_edge = i < node.edges.size() && node.edges[i];
    inputs[i] = options_.create_graph && has_edge ? with_history(saved, node.edges[i]) : saved.value;
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const SavedTensor& saved = node.saved_outputs[i];
    if (!saved.value.defined()) continue;
    check_unchanged(node, saved, "output", i);
    outputs[i] = options_.create_graph
                     ? with_history(saved, {Ref<Node>(&node), static_cast<std::uint32_t>(i), {}})
                     : saved.value;
  }
  const Reads overwrites =
      options_.retain_graph || place.peephole == nullptr ? Reads{} : place.peephole->overwrites;
  const auto spare_of = [](Mask asked, const Tensors& kept) {
    Mask spare = 0;
    for (std::size_t i = 0; asked != 0 && i < kept.size(); ++i)
      if (has(asked, i) && kept[i].defined() && is_spare(kept[i])) spare |= bit(i);
    return spare;
  };
  const Reads spare{spare_of(overwrites.inputs, inputs), spare_of(overwrites.outputs, outputs)};
  InlineVec<std::uint64_t, 1> needs((node.edges.size() + 63) / 64);
  for (std::uint64_t& word : needs) word = 0;
  for (std::size_t i = 0; i < node.edges.size(); ++i)
    if (wanted(node.edges[i])) needs[i / 64] |= std::uint64_t{1} << (i % 64);
  InlineVec<std::uint64_t, 1> in_f32(place.peephole != nullptr && place.peephole->of_several ? needs.size()
                                                                                             : 0);
  for (std::uint64_t& word : in_f32) word = 0;
  for (std::size_t i = 0; in_f32.size() > 0 && i < node.edges.size(); ++i)
    if (wanted(node.edges[i]) && summed_in_f32(node.edges[i], node.specs[i].dtype))
      in_f32[i / 64] |= std::uint64_t{1} << (i % 64);
  const RuleScope scope(state_, node.op.get(), options_.create_graph);
  Tensors gradients = node.op->grad({place.gradients,
                                     inputs,
                                     outputs,
                                     node.specs,
                                     needs,
                                     options_.create_graph,
                                     {so_far, spare, std::exchange(place.sums, {}), sums, in_f32},
                                     options_.retain_graph});
  check<InternalError>(
      gradients.size() == node.edges.size(),
      "backward of {}: its gradient rule gives {} entries for {} inputs; give one an input, empty where "
      "it is not needed",
      node.op->name(), gradients.size(), node.edges.size());
  return gradients;
}

/// `whole`: the gradient includes what was there before. `sums`: of the gradient, or empty.
void BackwardPass::deliver(const Edge& edge, Tensor gradient, const Node& from, std::size_t input, bool whole,
                           Tensor sums) {
  const Spec& spec = from.specs[input];
  Tensor* sum = sum_at(edge, spec.dtype);
  if (sum == nullptr) return;
  const Peephole* peephole = from.op->peephole();
  const bool wider = peephole != nullptr && peephole->of_several && gradient.dtype() == DType::f32 &&
                     summed_in_f32(edge, spec.dtype);
  if (!fits(gradient, wider ? Spec{spec.shape, DType::f32, spec.device} : spec))
    refuse(fmt::format("backward of {}", from.op->name()), fmt::format("gradient of input {}", input),
           gradient, "the input", from.specs[input]);
  const bool alone = whole || !sum->defined();
  if (edge.node && edge.index == 0 && !stops_at(edge))
    places_[edge.node->slot].sums = alone ? std::move(sums) : Tensor();
  if (whole)
    *sum = std::move(gradient);
  else
    add(edge, spec.dtype, *sum, std::move(gradient));
}

/// Counts an edge into a leaf that has delivered or never will; after the last one the sum is complete.
void BackwardPass::settle(const Edge& edge) {
  if (!edge.leaf || stops_at(edge) || leaves(edge)) return;
  LeafPlace& place = leaves_[edge.leaf->slot];
  if (--place.due > 0 || !feeding_ || !place.sum.value.defined()) return;
  const Leaf& leaf = *place.leaf;
  if (!passing_ || leaf.sink || (leaf.hooks.empty() && leaf.after_accumulate.empty()))
    return hand_over(place);
  hooked_.insert(
      std::ranges::lower_bound(hooked_, leaf.place, {}, [](const LeafPlace* l) { return l->leaf->place; }),
      &place);
}

void BackwardPass::hand_over(LeafPlace& place) {
  Leaf& leaf = *place.leaf;
  if (leaf.frozen) return;  // unmarked after the forward pass recorded it
  Tensor gradient = through_hooks(leaf.hooks, whole(place), title(leaf));
  if (leaf.sink)
    leaf.sink->accept(info_, leaf, std::move(gradient));
  else
    add_to_grad(leaf, std::move(gradient), options_.create_graph);
  if (!leaf.sink || !leaf.sink->accumulates_later())
    leaf.after_accumulate.each([&](const std::function<void(Leaf&)>& hook) { hook(leaf); });
}

void BackwardPass::call_back() {
  for (std::size_t i = 0; i < callbacks_.size(); ++i) {
    const std::function<void()> callback =
        std::move(callbacks_[i]);  // it may queue others, which moves the list
    callback();
  }
}

void BackwardPass::reads_over(const Node& node) {
  each_owned(node, [](const Ref<Storage>& shared) {
    const Ref<Storage> storage = shared;  // the owner may let go of it
    storage->owner()->read_done(*storage);
  });
}

void BackwardPass::abort() noexcept {
  for (const auto& sink : sinks_) sink->abort(info_);
  if (!announced_) return;
  for (std::size_t i = next_; i < places_.size(); ++i)
    each_owned(*places_[i].node,
               [](const Ref<Storage>& storage) { storage->owner()->forget_reads(*storage); });
}

}  // namespace sherd
