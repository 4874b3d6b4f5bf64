#include "autograd/tape.h"

#include <algorithm>

#include "autograd/pass.h"
#include "runtime/ops.h"
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

/// StateError for a write through a handle without history into memory of a tensor that has one: its gradient
/// would be that of the values before.
void check_histories(const AnyOp& op, const Tensor& written) {
  // A detached tensor may be written: the user asked for no history. If a gradient still needs the old
  // values, the storage's version tells the backward.
  check<StateError>(wants_grad(written) || written.impl()->alias || written.storage().histories() == 0,
                    "{}: a tensor of shape {} without history is written, and its memory holds one with a "
                    "history, whose gradient would not know (a view taken under NoGrad); write "
                    "that one, or do it under NoGrad, or write what detach() gives",
                    op.name(), written.shape());
}

/// StateError for a recorded write that would give the written handle a history which other handles on the
/// same memory lack.
void check_recorded_write(const AnyOp& op, const Tensor& written) {
  const AutogradRecord* record = record_of(written);
  check<StateError>(
      record == nullptr || !record->requires_grad || !record->edge.leaf,
      "{}: a leaf of shape {} that requires grad is written in place; do it under NoGrad, or write a copy",
      op.name(), written.shape());
  // Many functions return a view of what they computed. It may be written where no other handle is left, or
  // only those of nodes that keep the value, whose version tells their gradients.
  const bool only_history = record != nullptr && record->computed() && written.storage().histories() == 1;
  check<StateError>(!written.is_view() || only_history || written.storage().use_count() == 1,
                    "{}: a view of shape {} is written in place while gradients are recorded; write its "
                    "base, or clone the "
                    "view first",
                    op.name(), written.shape());
  check<StateError>(!written.impl()->alias || wants_grad(written) || written.storage().use_count() == 1,
                    "{}: a detached tensor of shape {} is written in place while gradients are recorded, and "
                    "others that share its memory would not have the history; write the tensor that it was "
                    "detached from, or clone it first",
                    op.name(), written.shape());
  check<StateError>(op.differentiable(),
                    "{}: has no gradient and would overwrite a tensor of shape {} that has one; do it "
                    "under NoGrad",
                    op.name(), written.shape());
}

/// NotImplementedError inside a gradient rule or `reference` whose ops will be differentiated: `what` is an
/// op or a host read at which the history would end, so that a term were lost unnoticed.
template <class What>
void check_no_lost_term(What&& what) {
  const PassState& state = pass_state();
  if (state.rule == nullptr || !state.rule_differentiated) return;
  fail<NotImplementedError>(
      "backward of {}: its gradient is differentiated through ops, and it uses {}, so that a term would be "
      "lost; "
      "write it in ops that have a gradient, or detach what is constant",
      state.rule->name(), what());
}

Tensor without_history(const Tensor& t) {
  auto impl = make_ref<TensorImpl>(t.storage_ref(), t.layout(), t.dtype());
  return Tensor(std::move(impl));
}

SavedTensor keep(const Tensor& t) { return {without_history(t), t.storage().version()}; }

Edge edge_to(const Tensor& t) {
  const AutogradRecord* record = record_of(t);
  return record != nullptr && record->requires_grad ? record->edge : Edge{};
}

}  // namespace

void check_fresh_view(std::string_view user, const Tensor& t) {
  if (!t.defined() || !t.is_view()) return;
  check<StateError>(t.impl()->view_version >= t.storage().recorded_version(),
                    "{}: an input of shape {} is a view of a tensor that was changed in place after the view "
                    "was taken, with "
                    "gradients recorded; take the view again after the change",
                    user, t.shape());
}

void Tape::before_write(const AnyOp& op, Inputs in) {
  overwritten_ = {};
  if (!Context::current().grad_enabled()) return;
  for (const Tensor& t : in) check_fresh_view(op.name(), t);
  const Mask needs = inputs_wanting_grad(in);
  const Reads reads = needs != 0 ? op.reads(needs) : Reads{};
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (!op.writes(i) || !in[i].defined()) continue;
    check_histories(op, in[i]);
    if (needs == 0) continue;
    check_recorded_write(op, in[i]);
  }
  keep_overwritten(op, in, reads);
}

void Tape::keep_overwritten(const AnyOp& op, Inputs in, Reads reads) {
  if (reads.inputs == 0) return;
  // Inputs that share memory with a written one are the same elements: other overlaps were refused before.
  const auto is_written = [&](const Tensor& t) {
    for (std::size_t i = 0; i < in.size(); ++i)
      if (op.writes(i) && in[i].defined() && in[i].storage_ref() == t.storage_ref() &&
          in[i].layout().offset == t.layout().offset)
        return true;
    return false;
  };
  Tensors copies(in.size());
  bool any = false;
  const NoGrad off;
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (!has(reads.inputs, i) || !in[i].defined() || in[i].numel() == 0 || !is_written(in[i])) continue;
    copies[i] = clone(in[i]);
    any = true;
  }
  if (any) overwritten_ = {&op, std::move(copies)};
}

const Tensor& Tape::read_by(const AnyOp& op, Inputs in, std::size_t i) const {
  const bool copied = overwritten_.by == &op && overwritten_.inputs[i].defined();
  return copied ? overwritten_.inputs[i] : in[i];
}

std::uint64_t Tape::sequence_behind(std::span<const Edge> edges) {
  for (const Edge& edge : edges)
    if (edge.node) next_sequence_ = std::max(next_sequence_, edge.node->sequence + 1);
  return next_sequence_++;
}

void Tape::after(const AnyOp& op, Inputs in, Outputs out) {
  if (!Context::current().grad_enabled()) return;
  const Mask needs = inputs_wanting_grad(in);
  if (!op.mutating())
    for (const Tensor& t : in) check_fresh_view(op.name(), t);
  if (needs == 0) return;
  if (!op.differentiable()) {
    const auto carries = [](const Tensor& t) { return is_floating(t.dtype()); };  // integers have no gradient
    if (std::any_of(out.begin(), out.end(), carries))
      check_no_lost_term([&] { return fmt::format("{}, which has none", op.name()); });
    return;
  }

  auto node = make_ref<Node>();
  node->op = op.keep();
  const Reads reads = op.reads(needs);
  for (std::size_t i = 0; i < in.size(); ++i) {
    node->edges.push_back(edge_to(in[i]));
    node->saved_inputs.push_back(has(reads.inputs, i) && in[i].defined() ? keep(read_by(op, in, i))
                                                                         : SavedTensor{});
    node->specs.push_back(in[i].defined() ? in[i].spec() : Spec::none());
  }
  node->sequence = sequence_behind({node->edges.begin(), node->edges.end()});
  for (std::size_t i = 0; i < out.size(); ++i) {
    node->saved_outputs.push_back(has(reads.outputs, i) ? keep(out[i]) : SavedTensor{});
    node->outputs.push_back(out[i].spec());
  }
  // Last, because from here on others reach the node: it must be complete.
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (!is_floating(out[i].dtype())) continue;
    const AutogradRecord* first = in.empty() ? nullptr : record_of(in[0]);
    const bool of_leaf = op.is_view() && (first == nullptr || !first->computed());
    ensure_record(out[i]).set_history(node, static_cast<std::uint32_t>(i),
                                      of_leaf ? nullptr : &out[i].storage());
    if (!op.mutating()) continue;
    out[i].storage().mark_recorded();
    out[i].impl()->view_version = out[i].storage().version();  // its history includes the write
  }
  if (op.mutating()) overwritten_ = {};
}

void Tape::host_read(const Tensor& tensor) {
  if (!Context::current().grad_enabled() || !wants_grad(tensor)) return;
  check_no_lost_term(
      [&] { return fmt::format("a value of a tensor of shape {} on the host", tensor.shape()); });
}

}  // namespace sherd
