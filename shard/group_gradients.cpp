// What a group does with the gradients that backwards bring.
#include <algorithm>
#include <utility>

#include "autograd/node.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/backward.h"
#include "shard/group.h"

namespace sherd::shard {

bool ParameterGroup::trainable() const {
  return std::ranges::any_of(members_, [](const Member& m) { return m.local.requires_grad(); });
}

void ParameterGroup::begin(PassInfo pass, Leaf&) {
  ++due_;
  Backward::current().begin(pass.number, *this);
}

void ParameterGroup::accept(PassInfo pass, Leaf& leaf, Tensor gradient) {
  members_[index_.at(&leaf)].gradient = std::move(gradient);
  --due_;
  Backward::current().arrived(pass.number);
}

void ParameterGroup::finish(PassInfo pass) { Backward::current().finish(pass.number); }
void ParameterGroup::abort(PassInfo pass) noexcept { Backward::current().abort(pass.number); }

void ParameterGroup::drop_gradients() noexcept {
  for (Member& m : members_) m.gradient = {};
  due_ = 0;
  reduced_ = {};
  reduction_ = {};
}

/// What backwards without communication left, unless the user cleared it.
Tensor ParameterGroup::take_unsynced(Slot& slot) const {
  if (!std::exchange(slot.unsynced, false)) return {};
  Tensor held = slot.leaf.grad();
  if (!held.defined()) slot.averaged = {};
  slot.leaf.set_grad(std::exchange(slot.averaged, {}));
  return held;
}

void ParameterGroup::keep(Slot& slot, const Tensor& gradient) const {
  const Tensor held = take_unsynced(slot);
  slot.averaged = slot.leaf.grad();
  slot.leaf.set_grad(held.defined() ? add_(held, gradient) : gradient);
  slot.unsynced = true;
}

void ParameterGroup::keep_gradients() {
  const NoGrad guard;
  due_ = 0;
  const DType dtype = spec_.layout == GroupLayout::flat ? compute_dtype_ : reduce_dtype();
  const auto own = [&](Tensor& gradient) {
    const Tensor g = std::exchange(gradient, {});
    return g.dtype() == dtype ? clone(g) : to(g, dtype);
  };
  if (!spec_.one_flat_param) {
    for (std::size_t i = 0; i < members_.size(); ++i)
      if (members_[i].gradient.defined()) keep(slots_[i], own(members_[i].gradient));
    return;
  }
  std::int64_t numel = 0;
  for (std::size_t i = 0; i < members_.size(); ++i)
    numel = std::max(numel, whole_layout(i).offset + spec_.shapes[i].numel());
  const Tensor all = zeros({numel}, {dtype, shard_.device()});
  bool any = false;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (!members_[i].gradient.defined()) continue;
    copy_(alias(all, whole_layout(i)), own(members_[i].gradient));
    any = true;
  }
  if (any) keep(slots_[0], all);
}

void ParameterGroup::end_reduction() {
  if (reduction_.posted()) wait_for_readers(reduction_);
  reduction_ = {};
}

/// This rank's gradients, with what it kept to itself so far; empty where it has none.
std::vector<Tensor> ParameterGroup::totals() {
  std::vector<Tensor> totals;
  Tensor all;
  if (spec_.one_flat_param) all = take_unsynced(slots_[0]);
  for (std::size_t i = 0; i < members_.size(); ++i) {
    Tensor own = spec_.one_flat_param ? (all.defined() ? alias(all, whole_layout(i)) : Tensor{})
                                      : take_unsynced(slots_[i]);
    Tensor fresh = std::exchange(members_[i].gradient, {});
    totals.push_back(!own.defined() ? fresh : !fresh.defined() ? own : add_(own, to(fresh, own.dtype())));
  }
  return totals;
}

/// Gradients where their parameters lie in the gathered segment, zeros elsewhere.
void ParameterGroup::fill_segment(const Tensor& region, int segment, std::span<const Tensor> totals) const {
  std::int64_t filled = 0;
  for (std::size_t i = 0; i < totals.size(); ++i)
    if (spec_.partition.span(static_cast<int>(i)).segment == segment && totals[i].defined())
      filled += totals[i].numel();
  if (filled < region.numel()) zero_(region);
  for (std::size_t i = 0; i < totals.size(); ++i) {
    const ParameterSpan& span = spec_.partition.span(static_cast<int>(i));
    if (span.segment != segment || !totals[i].defined()) continue;
    const Shape& shape = spec_.shapes[i];
    copy_(alias(region, {shape, contiguous_strides(shape), region.layout().offset + span.offset}), totals[i]);
  }
}

/// For every rank's slice, one element a parameter: whether this rank has a gradient.
void ParameterGroup::mark_present(const Tensor& present, std::span<const Tensor> totals) const {
  const bool all = std::ranges::all_of(totals, [](const Tensor& t) { return t.defined(); });
  fill_(present, all ? 1 : 0);
  const auto flags = static_cast<std::int64_t>(totals.size());
  for (std::int64_t i = 0; i < flags && !all; ++i)
    if (totals[static_cast<std::size_t>(i)].defined())
      fill_(alias(present, {{spec_.partition.ranks()}, {flags}, present.layout().offset + i}), 1);
}

/// Every segment's gradient over all ranks, zeros where this rank has none, and for every parameter whether
/// it has one. A gradient that is its segment as it lies travels from where it is.
Collective ParameterGroup::reduction(std::vector<Tensor> totals) {
  const Partition& partition = spec_.partition;
  const std::int64_t ranks = partition.ranks(), flags = static_cast<std::int64_t>(totals.size());
  const TensorOptions like{reduce_dtype(), shard_.device()};
  const bool per_parameter = spec_.layout == GroupLayout::per_parameter;
  const auto fits = [&](int s) {
    const Tensor& t = totals[static_cast<std::size_t>(s)];
    return per_parameter && t.defined() && t.dtype() == like.dtype && t.is_contiguous() &&
           t.numel() == partition.gathered_numel(s);
  };
  std::int64_t buffered = flags * ranks;
  for (int s = 0; s < partition.segments(); ++s) buffered += fits(s) ? 0 : partition.gathered_numel(s);
  const Tensor buffer = empty({buffered}, like);
  reduced_ = empty({partition.shard_numel() + flags}, like);

  Collective c{
      .kind = spec_.ranks.shard.defined() ? CollectiveKind::reduce_scatter : CollectiveKind::all_reduce,
      .inputs = {},
      .outputs = {},
      .reduction = ReduceOp::average(),
      .channel = reduce_channel,
      .label = label};
  std::int64_t at = 0;
  for (int s = 0; s < partition.segments(); ++s) {
    c.outputs.push_back(flat_view(reduced_, partition.shard_offset(s), partition.shard_numel(s)));
    if (fits(s)) {
      const Tensor& t = totals[static_cast<std::size_t>(s)];
      c.inputs.push_back(flat_view(t, 0, t.numel()));
      continue;
    }
    const Tensor region = flat_view(buffer, at, partition.gathered_numel(s));
    at += partition.gathered_numel(s);
    fill_segment(region, s, totals);
    c.inputs.push_back(region);
  }
  const Tensor present = flat_view(buffer, at, flags * ranks);
  mark_present(present, totals);
  c.inputs.push_back(present);
  c.outputs.push_back(flat_view(reduced_, partition.shard_numel(), flags));
  return c;
}

void ParameterGroup::post_reduction() {
  const NoGrad guard;
  due_ = 0;
  const Ranks& ranks = spec_.ranks;
  if (!ranks.shard.defined() && !ranks.replicas.defined()) return reduce_alone(totals());
  reduction_ = (ranks.shard.defined() ? ranks.shard : ranks.replicas).enqueue(reduction(totals()));
}

/// A rank without peers: its gradients are the average.
void ParameterGroup::reduce_alone(const std::vector<Tensor>& totals) {
  const bool any = std::ranges::any_of(totals, [](const Tensor& t) { return t.defined(); });
  if (spec_.one_flat_param && any) {
    const Tensor all = zeros(shard_.shape(), {shard_.dtype(), shard_.device()});
    for (std::size_t i = 0; i < totals.size(); ++i)
      if (totals[i].defined()) copy_(alias(all, whole_layout(i)), to(totals[i], reduce_dtype()));
    add_to(slots_[0], all);
  } else if (!spec_.one_flat_param) {
    for (std::size_t i = 0; i < totals.size(); ++i) {
      if (!totals[i].defined()) continue;
      // The gradient may be seen by others; `.grad` is written in place later.
      const Tensor reduced = to(to(totals[i], reduce_dtype()), shard_.dtype());
      add_to(slots_[i], reduced.is(totals[i]) && reduced.impl()->use_count() > 1 ? clone(reduced) : reduced);
    }
  }
}

void ParameterGroup::add_to(Slot& slot, const Tensor& part) const {
  const Tensor held = slot.leaf.grad();
  slot.leaf.set_grad(held.defined() ? add_(held, part) : part);
}

void ParameterGroup::finish_reduction() {
  if (!reduced_.defined()) return;
  const NoGrad guard;
  reduction_.wait();
  const Tensor reduced = std::exchange(reduced_, {});
  const Ranks& ranks = spec_.ranks;
  if (ranks.shard.defined() && ranks.replicas.defined())
    ranks.replicas.all_reduce(reduced, ReduceOp::average(), {.label = label, .channel = reduce_channel});

  const std::int64_t numel = spec_.partition.shard_numel(),
                     flags = static_cast<std::int64_t>(members_.size());
  const std::vector<float> present =
      to(to(flat_view(reduced, numel, flags), DType::f32), Device::cpu()).to_vector<float>();
  const Tensor result = to(flat_view(reduced, 0, numel), shard_.dtype());
  if (spec_.one_flat_param) {
    if (std::ranges::any_of(present, [](float f) { return f != 0; })) add_to(slots_[0], result);
    return;
  }
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (present[i] == 0 || !members_[i].local.requires_grad()) continue;
    sherd::Layout layout = local_layout(i);
    // In the flat layout a rank without a part has no gradient either; without dim 0 rows it has an empty
    // one.
    if (spec_.layout == GroupLayout::flat && layout.shape.numel() == 0 && !whole_ &&
        spec_.shapes[i].numel() > 0)
      continue;
    layout.offset += result.layout().offset;
    add_to(slots_[i], alias(result, layout));
  }
}

}  // namespace sherd::shard
