#include "autograd/tape.h"

#include "runtime/upper_floor.h"

namespace sherd {

void install_listeners(Context& context) { context.add_listener(context.slot<Tape>()); }

namespace {

Mask inputs_wanting_grad(Inputs in) {
  Mask needs = 0;
  for (std::size_t i = 0; i < in.size(); ++i)
    if (wants_grad(in[i])) needs |= bit(i);
  return needs;
}

/// A view tells its base's history as of when it was taken; a recorded write since then made it a stranger.
void check_fresh_view(const AnyOp& op, const Tensor& t) {
  if (!t.defined() || !t.is_view()) return;
  check<StateError>(t.impl()->view_version >= t.storage().recorded_version(),
                    "{}: an input of shape {} is a view of a tensor that was changed in place after the view "
                    "was taken, with "
                    "gradients recorded; take the view again after the change",
                    op.name(), t.shape());
}

Tensor without_history(const Tensor& t) {
  auto impl = make_ref<TensorImpl>(t.storage_ref(), t.layout(), t.dtype());
  return Tensor(std::move(impl));
}

SavedTensor keep(const Tensor& t) { return {without_history(t), t.storage().version()}; }

Edge edge_to(const Tensor& t) {
  const AutogradRecord* record = record_of(t);
  return record->edge;
}

}  // namespace

void Tape::before_write(const AnyOp& op, Inputs in) {
  if (!Context::current().grad_enabled()) return;
  const Mask needs = inputs_wanting_grad(in);
  if (needs == 0) return;
  const Reads reads = op.reads(needs);
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (!op.writes(i)) continue;
    const AutogradRecord* record = record_of(in[i]);
    check<StateError>(
        record == nullptr || !record->requires_grad || !record->edge.leaf,
        "{}: a leaf of shape {} that requires grad is written in place; do it under NoGrad, or write a copy",
        op.name(), in[i].shape());
    check<StateError>(!in[i].is_view(),
                      "{}: a view of shape {} is written in place while gradients are recorded; write its "
                      "base, or clone the "
                      "view first",
                      op.name(), in[i].shape());
    check<StateError>(op.differentiable(),
                      "{}: has no gradient and would overwrite a tensor of shape {} that has one; do it "
                      "under NoGrad",
                      op.name(), in[i].shape());
    check<StateError>(!has(reads.inputs, i),
                      "{}: its gradient needs the value that it overwrites; use the form that is not in "
                      "place",
                      op.name());
  }
}

void Tape::after(const AnyOp& op, Inputs in, Outputs out) {
  if (!Context::current().grad_enabled()) return;
  const Mask needs = inputs_wanting_grad(in);
  for (const Tensor& t : in) check_fresh_view(op, t);
  if (needs == 0 || !op.differentiable()) return;

  auto node = make_ref<Node>();
  node->op = op.keep();
  node->needs = needs;
  const Reads reads = op.reads(needs);
  for (std::size_t i = 0; i < in.size(); ++i) {
    node->edges.push_back(has(needs, i) ? edge_to(in[i]) : Edge{});
    node->saved_inputs.push_back(has(reads.inputs, i) && in[i].defined() ? keep(in[i]) : SavedTensor{});
    node->specs.push_back(in[i].defined() ? in[i].spec() : Spec::none());
  }
  // Larger than every input's, also when the graph was begun on another thread.
  for (const Edge& edge : node->edges)
    if (edge.node) next_sequence_ = std::max(next_sequence_, edge.node->sequence + 1);
  node->sequence = next_sequence_++;
  for (std::size_t i = 0; i < out.size(); ++i) {
    node->saved_outputs.push_back(has(reads.outputs, i) ? keep(out[i]) : SavedTensor{});
    node->outputs.push_back(out[i].spec());
    if (!is_floating(out[i].dtype())) continue;
    AutogradRecord& record = ensure_record(out[i]);
    record.requires_grad = true;
    record.leaf = {};
    record.edge = {node, static_cast<std::uint32_t>(i), {}};
    if (op.mutating()) out[i].storage().mark_recorded();
  }
}

}  // namespace sherd
