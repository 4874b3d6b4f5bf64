// How a frame replays its forward, and stands in the tape.
#include "autograd/capture/frame.h"

#include <algorithm>

#include "autograd/capture/drawing.h"
#include "autograd/capture/resident.h"
#include "autograd/tape.h"
#include "runtime/fused_product.h"

namespace sherd {
namespace {

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
  // Owners hear what the backward will read, and when it is over. It may read a part: whether that was
  // changed the frame asks.
  for (std::size_t k = 0; k < kept_.size(); ++k)
    if (kept_[k].outside && is_brought(*kept_[k].outside))
      node->saved_inputs.push_back(
          {Tensor(make_ref<TensorImpl>(kept_[k].outside, Layout{{0}, {1}, 0}, DType::u8)),
           call->versions[k]});
  node->folded = call;
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

std::unique_ptr<Program::Impl> Frame::program_of(Recorded recorded) const {
  return std::make_unique<Program::Impl>(run_passes(std::move(recorded), passes_), std::vector<Tensor>{});
}

bool Frame::holds() const {
  return std::ranges::all_of(found_, [](const Found& found) {
    const Layout &now = found.tensor.layout(), &then = found.layout;
    return wants_grad(found.tensor) == found.wanted && found.tensor.storage().id() == found.storage &&
           now.offset == then.offset && now.shape == then.shape && now.strides == then.strides;
  });
}

std::uint64_t Frame::sequence_behind(const std::vector<Tensor>& inputs) {
  Tape& tape = Context::current().slot<Tape>();
  std::uint64_t place = tape.take_sequence();
  for (const Tensor& t : inputs)
    if (const AutogradRecord* record = record_of(t)) place = tape.sequence_behind({&record->edge, 1});
  return place;
}

/// Takes places in the order of recording for the nodes that eager ops would record up to the next mark.
void Frame::begin_segment(FrameCall& call) const {
  const std::size_t segment = call.segments.size();
  call.segments.push_back(
      Context::current().slot<Tape>().take_sequences(begins_[segment + 1] - begins_[segment]));
}

/// An owner is asked ahead of the node that reads, at whose place that may be: passes go by what is behind.
std::uint64_t Frame::place_in_call(std::uint64_t traced) const {
  const std::size_t segment = running_->segments.size() - 1;
  const auto begin = places_.begin() + static_cast<std::ptrdiff_t>(begins_[segment]),
             end = places_.begin() + static_cast<std::ptrdiff_t>(begins_[segment + 1]);
  return running_->segments[segment] +
         static_cast<std::uint64_t>(std::lower_bound(begin, end, traced) - begin);
}

/// What its marks began is over when it throws.
std::vector<Tensor> Frame::run_forward(const std::vector<Tensor>& inputs, FrameCall& call) {
  running_ = &call;
  sequence_behind(inputs);
  begin_segment(call);
  begun_.clear();
  try {
    return forward_->run_half(inputs, call.kept, call.start);
  } catch (...) {
    for (; !begun_.empty(); begun_.pop_back())
      if (*begun_.back()) (*begun_.back())();
    throw;
  }
}

std::vector<Tensor> Frame::replay(const std::vector<Tensor>& inputs) {
  const auto call = std::make_shared<FrameCall>(shared_from_this());
  Generator& generator = Context::current().generator();
  call->start = generator.state();
  call->kept.resize(kept_.size());
  call->as_eager = to_fit_ != nullptr;
  for (std::size_t k = 0; k < kept_.size(); ++k) call->kept[k].memory = kept_[k].outside;
  generator.set_state({call->start.seed, call->start.offset + (end_.offset - begin_.offset)});
  const std::vector<Tensor> results = run_forward(inputs, *call);
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
  const std::size_t returned = outputs.size() - set_inputs_.size();
  for (std::size_t k = 0; k < set_inputs_.size(); ++k) set_(inputs[set_inputs_[k]], outputs[returned + k]);
  outputs.resize(returned);
  find_edges(*call, inputs);
  attach(call, outputs);
  return outputs;
}

std::string Frame::text() const {
  if (!unfit_.empty()) return "runs eagerly: " + unfit_ + "\n";
  std::string text = "forward\n" + forward_->text();
  for (const Backward& backward : backwards_)
    text += backward.program ? "backward\n" + backward.program->text() : "backward runs eagerly\n";
  return text;
}

void Frame::draw(std::vector<std::string>& drawings) const {
  if (forward_) drawings.push_back(drawing(*forward_));
  for (const Backward& backward : backwards_)
    if (backward.program) drawings.push_back(drawing(*backward.program));
}

void Frame::count(CompileStats& stats) const {
  stats.sharding_hooks += hooks_;
  if (!forward_) return;
  ++stats.programs;
  const auto add = [&](const Program::Impl& program) {
    ++stats.graphs;
    stats.ops.push_back(program.steps.size());
    for (const Program::Impl::Step& step : program.steps) {
      if (!step.op->is_view()) ++stats.launches;
      const ops::ProductRegion* const product = ops::product_region_of(*step.op);
      const ops::Region* const region = product != nullptr ? product->region.get() : ops::region_of(*step.op);
      if (region == nullptr) continue;
      ++stats.regions;
      stats.ops_in_regions += region->members.size() + (product != nullptr ? 1 : 0);
      if (product != nullptr) stats.bytes_saved += product->bytes_of_result();
      stats.bytes_saved += region->bytes_saved();
    }
  };
  add(*forward_);
  for (const Backward& backward : backwards_) {
    if (!backward.program) continue;
    add(*backward.program);
    stats.peak_bytes = std::max(stats.peak_bytes, peak_of(*forward_, *backward.program, backward.roundings));
  }
  stats.eager_peak_bytes = std::max(stats.eager_peak_bytes, eager_peak_);
}

std::int64_t Frame::peak_of(const Program::Impl& forward, const Program::Impl& backward,
                            std::span<const Program::Impl::Rounding> roundings) {
  return std::max(forward.workspace_bytes(), backward.workspace_bytes()) +
         std::max(forward.held_bytes(), backward.held_bytes(forward.kept_inputs(), roundings));
}

}  // namespace sherd
