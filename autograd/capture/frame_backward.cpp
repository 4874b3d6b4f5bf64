// A frame's backwards: by a program, or by the graph that eager ops would have recorded.
#include <algorithm>

#include "autograd/capture/frame_walk.h"
#include "autograd/capture/passes/rewrite.h"
#include "autograd/region.h"
#include "autograd/tape.h"
#include "runtime/bytes_taken.h"

namespace sherd {
namespace {

constexpr std::size_t most_backwards = 8;  // of one forward

}  // namespace

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
  for (const Again& again : std::span(regions_).first(call.as_eager ? regions_as_eager_ : regions_.size())) {
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
  for (std::size_t k = 0; k < call.kept.size(); ++k)
    storages.push_back(call.kept[k].memory || !kept_[k].region
                           ? call.kept[k].memory
                           : released_by(regions[*kept_[k].region], kept_[k].index));
  return storages;
}

void Frame::check_keeps(const FrameCall& call) const {
  const std::size_t kept = call.as_eager ? kept_as_eager_ : kept_.size();
  check<StateError>(call.kept.size() == kept && call.edges.size() == targets_.size(),
                    "backward of compiled: an earlier backward broke off and let go of what it read; run the "
                    "forward again");
}

/// The nodes that eager ops would have recorded, made of what the call kept, oldest first. `edge_of`: where a
/// way leads that leaves the frame; `place_of`: a node's, by its number and edges.
template <class EdgeOf, class PlaceOf>
std::vector<Ref<Node>> Frame::nodes_of(const FrameCall& call, const EdgeOf& edge_of,
                                       const PlaceOf& place_of) const {
  const std::vector<Ref<Storage>> storages = storages_of(call);
  const auto saved = [&](const std::optional<KeptTensor>& kept) -> SavedTensor {
    if (!kept) return {};
    Layout layout = kept->layout;
    layout.offset += call.kept[kept->number].shift;
    return {Tensor(make_ref<TensorImpl>(storages[kept->number], std::move(layout), kept->dtype)),
            call.versions[kept->number]};
  };
  std::vector<Ref<Node>> nodes;
  for (const Recipe& recipe : recipes_) {
    auto node = make_ref<Node>();
    node->op = op_of(call, recipe.op);
    for (const Way& way : recipe.ways)
      node->edges.push_back(way.to == Way::To::node     ? Edge{nodes[way.index], way.output, {}}
                            : way.to == Way::To::target ? edge_of(way)
                                                        : Edge{});
    for (const auto& kept : recipe.inputs) node->saved_inputs.push_back(saved(kept));
    for (const auto& kept : recipe.outputs) node->saved_outputs.push_back(saved(kept));
    node->specs = recipe.specs;
    node->outputs = recipe.results;
    node->sequence = place_of(nodes.size(), *node);
    nodes.push_back(std::move(node));
  }
  return nodes;
}

/// By the graph that eager ops would have recorded, made anew of what the call kept. `tracer`: hears it.
Tensors Frame::differentiate(const FrameCall& call, const GradArgs& args, Tracer* tracer) {
  Tape& tape = Context::current().slot<Tape>();
  const std::uint64_t since = tape.sequence_behind(call.edges);
  const std::vector<Ref<Node>> nodes = nodes_of(
      call, [&](const Way& way) { return call.edges[way.index]; },
      [&](std::size_t, const Node& node) {
        return tape.sequence_behind({node.edges.begin(), node.edges.end()});
      });
  BackwardPass pass("backward", {.retain_graph = args.retain_graph});
  for (std::size_t i = 0; i < args.gy.size(); ++i)
    if (args.gy[i].defined())
      pass.seed({nodes[result_ways_[i].index], result_ways_[i].output, {}}, args.gy[i]);
  std::vector<BackwardPass::Asked> asked;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < edges_.size(); ++i) {
    if (!args.need(i) || i != targets_[edges_[i]].edge) continue;
    asked.push_back({call.edges[edges_[i]], i < args.beside.so_far.size() ? args.beside.so_far[i] : Tensor{},
                     args.beside.is_in_f32(i)});
    places.push_back(i);
  }
  walk_->watch(pass, nodes, places, tracer);
  std::vector<Tensor> found = pass.partial(asked, since);
  Tensors gradients(edges_.size());
  for (std::size_t k = 0; k < places.size(); ++k) gradients[places[k]] = std::move(found[k]);
  return gradients;
}

std::vector<Edge> Frame::unfold(FrameCall& call) {
  check_keeps(call);
  std::vector<std::uint64_t> next = call.segments;
  const std::vector<Ref<Node>> nodes = nodes_of(
      call, [&](const Way& way) { return call.edges[way.index]; },
      [&](std::size_t n, const Node&) {
        return call.places.empty() ? next[recipes_[n].marks]++ : call.places[n];
      });
  std::vector<Edge> ends;
  for (const Way& way : result_ways_) ends.push_back({nodes[way.index], way.output, {}});
  call.kept.clear();  // the nodes have it
  call.edges.clear();
  return ends;
}

std::vector<Edge> FrameCall::make() { return frame->unfold(*this); }
bool FrameCall::depends(std::uint32_t output) const { return frame->depends(output); }

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
  walk_->goes_by(*backward.program);
  const std::vector<Tensor> results = backward.program->run_half(given, kept, call.start);
  Tensors gradients(edges_.size());
  for (std::size_t i = 0; i < edges_.size(); ++i)
    if (backward.results[i]) gradients[i] = results[*backward.results[i]];
  return gradients;
}

/// What a program of the backward that was heard is made of.
Recorded Frame::learn_backward(Tracer& tracer, const FrameCall& call, const std::vector<Tensor>& given,
                               const Tensors& gradients, Backward& made) const {
  std::vector<Tensor> results;  // behind those that were handed over
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const Tensor& gradient = gradients[i];
    const std::size_t at = tracer.handed.size() + results.size();
    made.results.push_back(gradient.defined() ? std::optional(static_cast<std::uint32_t>(at)) : std::nullopt);
    if (!gradient.defined()) continue;
    results.push_back(gradient);
    const Spec& spec = targets_[edges_[i]].spec;
    const auto bytes = [&](DType dtype) {
      return static_cast<std::size_t>(gradient.numel() * size_of(dtype));
    };
    const auto taken = [&](DType dtype) {
      return static_cast<std::int64_t>(bytes_taken(gradient.device(), bytes(dtype)));
    };
    const bool copied = targets_[edges_[i]].leaf != nullptr &&  // which has dense memory of its own
                        (!gradient.is_contiguous() || gradient.storage().bytes() != bytes(gradient.dtype()));
    if (gradient.dtype() != spec.dtype)
      made.roundings.push_back({taken(gradient.dtype()), taken(spec.dtype)});
    else if (copied)
      made.roundings.push_back({0, taken(spec.dtype)});
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
  const auto is_kept = [&](const Storage& storage) { return number_of(&storage) < call.kept.size(); };
  for (const Tensor& t : results)
    check<StateError>(!is_kept(t.storage()),
                      "compile: a gradient of shape {} is memory that the backward was handed", t.shape());
  for (const Tensor& t : given)
    check<StateError>(!is_kept(t.storage()),
                      "compile: a gradient of shape {} shares memory with what the backward reads",
                      t.shape());
  Cut cut;
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
  for (const TracedTensor& t : tracer.handed)
    check<StateError>(
        t.storage != TracedTensor::none && !(tracer.trace().storages[t.storage].outside &&
                                             is_kept(*tracer.trace().storages[t.storage].outside)),
        "compile: a gradient comes of no op of the backward");
  Recorded recorded = tracer.take(given, results);
  recorded.outputs.insert(recorded.outputs.begin(), tracer.handed.begin(), tracer.handed.end());
  check<StateError>(recorded.random_begin == recorded.random_end, "compile: a backward draws random numbers");
  check<StateError>(tracer.set.empty(), "compile: a gradient lets what it is given show other memory");
  // Elsewhere in the same memory than in the forward's trace, as the kept input of this call may lie.
  std::vector<std::int64_t> shift(recorded.trace.storages.size());
  for (const auto& [storage, k] : cut.kept) shift[storage] = call.kept[k].shift;
  for (TracedOp& traced : recorded.trace.ops)
    each_tensor_of(traced, [&](TracedTensor& t) { t.layout.offset -= shift[t.storage]; });
  for (TracedTensor& t : recorded.outputs) t.layout.offset -= shift[t.storage];
  recorded.random_begin = call.start;
  recorded.random_end = {call.start.seed, call.start.offset + (end_.offset - begin_.offset)};
  recorded.cut = std::move(cut);
  return recorded;
}

Tensors Frame::trace_backward(const FrameCall& call, const GradArgs& args, const std::vector<Tensor>& given,
                              Words words) {
  Tracer tracer(given, false, 0);
  Tensors gradients;
  {
    const Listening listening(tracer);
    gradients = differentiate(call, args, &tracer);
  }
  hooks_ += tracer.marks.size();
  Backward made{std::move(words), nullptr, {}, {}};
  Recorded recorded;
  tracer.attempt([&] {
    recorded = learn_backward(tracer, call, given, gradients, made);
    made.program = program_of(recorded);
  });
  if (!tracer.reason.empty()) {
    made.program = nullptr;
  } else if (to_fit_) {
    if (forward_->running()) return gradients;  // the next one is looked at
    fit(call, recorded, made);
  }
  backwards_.push_front(std::move(made));
  if (backwards_.size() > most_backwards) backwards_.pop_back();
  return gradients;
}

Tensors Frame::backward(FrameCall& call, const GradArgs& args) {
  check_keeps(call);
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
  BackwardPass* const outer = pass_state().innermost;
  const bool marked = !marks_.empty() && !call.twins && outer->feeds();
  words.push_back(marked ? 1 : 0);
  Walk walk(*this, call, marked ? outer : nullptr);
  Tensors gradients;
  Backward* known = find(words);
  const bool before_fit = call.as_eager && to_fit_ == nullptr;  // programs read less
  if (call.twins || before_fit || sherd::Tracer::active())
    gradients = differentiate(call, args);
  else if (known == nullptr)
    gradients = trace_backward(call, args, given, std::move(words));
  else if (known->program == nullptr || known->program->running() || !unchanged(call, known->reads))
    gradients = differentiate(call, args);
  else
    gradients = run(*known, call, args, given);
  if (!args.retain_graph) {
    call.kept.clear();
    call.edges.clear();
  }
  return gradients;
}

}  // namespace sherd
