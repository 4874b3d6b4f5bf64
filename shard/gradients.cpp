#include "shard/gradients.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "autograd/node.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/ops/copy.h"
#include "shard/engine.h"
#include "shard/group.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

/// Nobody else sees its memory.
bool alone(const Tensor& t) {
  return t.impl()->use_count() == 1 && t.storage().use_count() == 1 && t.is_contiguous() &&
         !t.storage().borrowed();
}

/// Of a dense f32 tensor. Read past the listeners: what had a gradient when a step was captured has one in
/// every replay, which all ranks make alike. On `meta`, in a dry run, all count as there.
std::vector<float> flags_of(const Tensor& t) {
  if (t.device().type == DeviceType::meta) return std::vector<float>(static_cast<std::size_t>(t.numel()), 1);
  std::vector<float> flags(static_cast<std::size_t>(t.numel()));
  const std::size_t bytes = flags.size() * sizeof(float);
  if (t.device().is_cpu())
    std::memcpy(flags.data(), t.raw(), bytes);
  else
    backend(t.device().type).copy(flags.data(), Device::cpu(), t.raw(), t.device(), bytes);
  return flags;
}

}  // namespace

void Gradients::add_slot(Tensor leaf, std::size_t first, std::size_t last) {
  slots_.push_back({std::move(leaf), first, last});
  members_.resize(last);
  Slot& slot = slots_.back();
  const Shape& end = group_.spec().shapes[last - 1];
  slot.shape = group_.spec().one_flat_param ? Shape{in_slot(slot, last - 1).offset + end.numel()} : end;
}

/// Where a member's gradient lies in its slot's.
sherd::Layout Gradients::in_slot(const Slot& slot, std::size_t i) const {
  const Shape& shape = group_.spec().shapes[i];
  return {shape, contiguous_strides(shape),
          group_.whole_layout(i).offset - group_.whole_layout(slot.first).offset};
}

void Gradients::take_over(Gradients& old, const std::function<Tensor(const Tensor&)>& change) {
  unreduced_ = old.unreduced_;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot &slot = slots_[i], &before = old.slots_[i];
    slot.unsynced = before.unsynced;
    slot.zeroed = before.zeroed;
    slot.averages = before.averages;
    if (before.averaged.defined()) slot.averaged = change(before.averaged);
    if (const Tensor grad = slot.leaf.grad(); grad.defined()) slot.shown = grad.storage().id();
  }
  if (old.summed_.defined()) summed_ = to(old.summed_, group_.compute_device());
  sums_ = old.sums_;
  old.unreduced_ = false;
  old.summed_ = {};
}

bool Gradients::pending() const { return unreduced_ || (summed_.defined() && group_.switches.all_reducing); }

void Gradients::renew_slot(std::size_t i, Tensor leaf) {
  Slot& slot = slots_[i];
  slot = {std::move(leaf), slot.first, slot.last, slot.shape};
  if (!summed_.defined()) return;
  const NoGrad guard;
  zero_(group_.part_in(summed_, i));
  fill_(flat_view(summed_, group_.spec().partition.shard_numel() + static_cast<std::int64_t>(i), 1), 0);
}

bool Gradients::elsewhere(const Slot& slot) const {
  return !group_.spec().one_flat_param && group_.elsewhere(slot.first);
}

void Gradients::check_replaced() const {
  for (const Slot& slot : slots_) {
    const Tensor held = slot.leaf.grad();
    if (!held.defined() || held.shape() == slot.leaf.shape()) continue;
    if (held.shape() == slot.shape && (slot.unsynced || unreduced_)) continue;
    if (elsewhere(slot)) continue;  // what is there counts for nothing
    check_writeback("gradient", group_.spec().names[slot.first], slot.leaf.shape(), held.shape());
  }
}

// ---- GradSink ----

Engine& EngineSink::engine() { return Engine::current(); }
void EngineSink::begun(PassInfo pass) { engine().begun(pass.number); }
void EngineSink::finish(PassInfo pass) { engine().finish(pass.number); }
void EngineSink::abort(PassInfo pass) noexcept { engine().abort(pass.number); }

void Gradients::begin(PassInfo pass, Leaf& leaf) {
  engine().begin(pass.number, group_);
  members_[member_of_.at(&leaf)].leaf = Ref<Leaf>(&leaf);
  ++due_;
}

void Gradients::accept(PassInfo pass, Leaf& leaf, Tensor gradient) {
  members_[member_of_.at(&leaf)].gradient = std::move(gradient);
  --due_;
  engine().arrived(pass.number);
}

// ---- turns ----

void Gradients::drop() noexcept {
  for (Member& m : members_) m = {};
  due_ = 0;
  turn_ = Turn::dropped;
  if (const auto down = std::exchange(down_, nullptr)) try {
      down->wait();                    // else its memory would be another tensor's while the device writes it
    } catch (const std::exception&) {  // the device has failed
    }
  reduced_ = average_ = flags_ = {};
  reduction_ = {};
  totals_.clear();
  for (Slot& slot : slots_) slot.added = false;
  hooked_.clear();
}

void Gradients::keep(DType computed_in) {
  due_ = 0;
  own_ = computed_in;
  turn_ = Turn::kept;
  for (Slot& slot : slots_) own_sum(slot);  // refuses before any group commits
}

DType Gradients::grad_dtype() const {
  return group_.spec().keep_low_precision_grads ? reduce_dtype() : group_.shard().dtype();
}

DType Gradients::reduce_dtype() const { return group_.spec().reduce_dtype.value_or(own_); }

void Gradients::reduce(DType computed_in, std::shared_ptr<const CallName> name) {
  due_ = 0;
  called_ = std::move(name);
  own_ = computed_in;
  const bool over_all = !in_two_calls() || group_.switches.all_reducing;
  turn_ = over_all ? Turn::reduced : Turn::reduced_over_shards;
  divide_by_ = group_.switches.comm_hook ? std::nullopt : group_.switches.divide_by;
  const Ranks& ranks = group_.spec().ranks;
  const Group& group = ranks.shard.defined() ? ranks.shard : ranks.replicas;
  const NoGrad guard;
  if (!group.defined()) {
    if (!offloaded()) return;
    totals_ = totals();
    if (!comes_down()) return;
    for (Tensor& t : totals_)
      if (t.defined() && !alone(t)) t = clone(t);  // others may write it before it is down
    down_ = backend(group_.compute_device().type).mark(group_.compute_device());
    return;
  }
  const Engine::OwnCalls own_calls;
  Collective call = reduction(totals());
  if (group_.switches.comm_hook) leave_to_hook(call);
  reduction_ = group.enqueue(std::move(call), WhenFull::queue);
}

/// All but the flags of presence, which tell what has a gradient.
void Gradients::leave_to_hook(Collective& reduction) {
  for (std::size_t i = 0; i + 1 < reduction.inputs.size(); ++i) {
    hooked_.push_back(reduction.inputs[i]);
    hooked_.push_back(reduction.outputs[i]);
  }
  reduction.inputs = {reduction.inputs.back()};
  reduction.outputs = {reduction.outputs.back()};
}

/// At the end of the walk: before, a peer might come to its own only after a gather that this rank has not
/// posted.
void Gradients::run_hook() {
  const NoGrad guard;
  const Ranks& ranks = group_.spec().ranks;
  const Tensors list = std::exchange(hooked_, {});
  for (std::size_t i = 0; i < list.size(); i += 2) {
    if (ranks.shard.defined()) {
      group_.switches.comm_hook(list[i], list[i + 1], ranks.shard);
    } else {
      copy_(list[i + 1], list[i]);
      group_.switches.comm_hook(list[i + 1], list[i + 1], ranks.replicas);
    }
  }
}

void Gradients::pass_on() {
  if (!hooked_.empty()) run_hook();
  if (!reduced_.defined() || !in_two_calls()) return;
  const NoGrad guard;
  reduction_.wait();
  reduction_ = {};
  if (summed_.defined()) add_(reduced_, to(summed_, reduced_.dtype()));
  if (turn_ == Turn::reduced_over_shards) return;
  const Engine::OwnCalls own_calls;
  reduction_ = group_.spec().ranks.replicas.enqueue({.kind = CollectiveKind::all_reduce,
                                                     .inputs = {reduced_},
                                                     .outputs = {reduced_},
                                                     .reduction = ReduceOp::sum(),
                                                     .channel = reduce_channel,
                                                     .label = called_->among_replicas()},
                                                    WhenFull::queue);
}

void Gradients::wait() {
  const NoGrad guard;
  if (turn_ == Turn::reduced_over_shards) {
    reduction_.wait();
    reduction_ = {};
    return;
  }
  if (reduced_.defined() && !down_) make_average();
  if (down_) return land();
  for (Tensor& t : totals_) t = brought_down(t);
  if (!reduced_.defined()) return;
  reduced_ = {};
  average_ = brought_down(average_);
  if (!complete_) present_ = flags_of(std::exchange(flags_, {}));
}

bool Gradients::waits_on_device() const {
  const Device device = group_.compute_device();
  return turn_ == Turn::reduced && reduced_.defined() && !down_ && !offloaded() && !device.is_cpu() &&
         device.type != DeviceType::meta;
}

void Gradients::wait_on_device(std::span<const std::shared_ptr<ParameterGroup>> groups) {
  const NoGrad guard;
  std::vector<Gradients*> waiting;
  std::int64_t count = 0;
  for (const auto& group : groups) {
    Gradients& g = group->gradients();
    if (!g.waits_on_device()) continue;
    if (!waiting.empty() && group->compute_device() != waiting[0]->group_.compute_device()) continue;
    g.make_average();
    g.reduced_ = {};  // what the average and the flags still show of it stays
    if (g.complete_) continue;
    count += g.flags_.numel();
    waiting.push_back(&g);
  }
  if (waiting.empty()) return;
  const Tensor all = empty({count}, {DType::f32, waiting[0]->group_.compute_device()});
  Tensors parts, flags;
  std::int64_t at = 0;
  for (const Gradients* g : waiting) {
    parts.push_back(flat_view(all, at, g->flags_.numel()));
    flags.push_back(g->flags_);
    at += g->flags_.numel();
  }
  copy_each_(parts, flags);
  const std::vector<float> present = flags_of(all);
  auto next = present.begin();
  for (Gradients* g : waiting) {
    const auto end = next + std::exchange(g->flags_, {}).numel();
    g->present_.assign(next, end);
    next = end;
  }
}

bool Gradients::offloaded() const { return group_.compute_device() != group_.shard().device(); }

/// From a device that may be at work to the host.
bool Gradients::comes_down() const {
  return offloaded() && group_.shard().device().is_cpu() && group_.compute_device().type != DeviceType::meta;
}

bool Gradients::calls_follow() const { return in_two_calls() || group_.switches.comm_hook; }

bool Gradients::here() const { return offloaded() ? !down_ && !reduced_.defined() : reduction_.done(); }

bool Gradients::set_out() {
  if (turn_ != Turn::reduced || !reduced_.defined() || down_ || !comes_down() || calls_follow()) return true;
  if (!reduction_.done()) return false;
  make_average();
  return true;
}

/// On the computing device. What comes down is made beside what the rank computes there: that follows none of
/// it.
void Gradients::make_average() {
  const NoGrad guard;
  const Device device = group_.compute_device();
  const std::unique_ptr<DeviceAside> aside = comes_down() ? backend(device.type).aside(device) : nullptr;
  const GroupSpec& spec = group_.spec();
  reduction_.wait();
  reduction_ = {};
  const std::int64_t numel = spec.partition.shard_numel();
  if (complete_)
    present_.assign(slots_.size(), 1);
  else
    flags_ = to(flat_view(reduced_, numel, static_cast<std::int64_t>(slots_.size())), DType::f32);
  average_ = flat_view(reduced_, 0, numel);
  if (divided_here()) average_ = divided(average_);
  average_ = to(average_, grad_dtype());
  if (comes_down()) down_ = backend(device.type).mark(device);
}

/// To the shard's device. After `down_`, where there is one, and after nothing that came later.
Tensor Gradients::brought_down(const Tensor& t) const {
  if (!t.defined()) return t;
  if (!down_) return to(t, group_.shard().device());
  const Tensor host = empty(t.shape(), {t.dtype(), group_.shard().device()});
  down_->read(host.raw(), t.raw(), static_cast<std::size_t>(t.numel() * size_of(t.dtype())));
  return host;
}

void Gradients::land() {
  if (!down_) return;
  const NoGrad guard;
  for (Tensor& t : totals_) t = brought_down(t);
  if (reduced_.defined()) {
    average_ = brought_down(average_);
    if (!complete_) present_ = flags_of(brought_down(std::exchange(flags_, {})));
  }
  reduced_ = {};
  down_ = nullptr;
}

/// In the flat layout on two devices an average takes the place of the one before in PyTorch, and is added to
/// it elsewhere: a program that keeps it means one or the other.
void Gradients::check_average() const {
  if (group_.spec().layout != GroupLayout::flat || !offloaded()) return;
  for (const Slot& slot : slots_) {
    if (!slot.leaf.requires_grad()) continue;
    const Tensor grad = slot.leaf.grad();
    const Held held = held_in(slot, grad);
    const Tensor& average = held == Held::own_sum ? slot.averaged : grad;
    check<StateError>(
        !average.defined() || slot.zeroed || (held == Held::own_given && slot.unsynced),
        "backward: '{}' has an average that was not cleared, and with shards on {} the flat layout does not "
        "add another one; zero_grad() before, accumulate under no_sync, or use the per-parameter layout",
        group_.spec().names[slot.first], to_string(group_.shard().device()));
  }
}

bool Gradients::commit() {
  const NoGrad guard;
  const Turn turn = std::exchange(turn_, Turn::to_come);
  if (turn != Turn::dropped) unreduced_ = turn == Turn::kept;
  if (turn == Turn::kept) commit_own();
  if (turn == Turn::reduced) {
    for (Slot& slot : slots_) slot.averages.look(slot.leaf, average_in(slot));
    average_.defined() ? commit_average() : commit_alone();
    for (Slot& slot : slots_) slot.averages.take_version(average_in(slot));
  }
  if (turn == Turn::reduced_over_shards) commit_over_shards();
  return turn == Turn::reduced;
}

std::vector<Gradients::Added> Gradients::take_added() {
  std::vector<Added> added;
  for (Slot& slot : slots_) {
    if (!std::exchange(slot.added, false)) continue;
    const Ref<Leaf> shown = record_of(slot.leaf)->leaf;
    for (std::size_t i = slot.first; i < slot.last; ++i)
      if (members_[i].leaf) added.push_back({members_[i].leaf, shown});
    added.push_back({shown, shown});
  }
  for (Member& m : members_) m.leaf = {};
  return added;
}

// ---- this rank's own sums ----

Gradients::Held Gradients::held_in(const Slot& slot, const Tensor& grad) {
  if (!grad.defined()) return Held::nothing;
  if (slot.unsynced && grad.storage().id() == slot.shown) return Held::own_sum;
  const bool whole = grad.shape() == slot.shape && (slot.unsynced || grad.shape() != slot.leaf.shape());
  return whole ? Held::own_given : Held::average;
}

/// What backwards without communication left in `.grad`, or the user in its place; empty if that was cleared,
/// or is an average.
Tensor Gradients::own_sum(Slot& slot) const {
  const Tensor grad = slot.leaf.grad();
  const Held held = held_in(slot, grad);
  if (held == Held::own_sum) return grad;
  const bool given = held == Held::own_given;
  if (!slot.unsynced && !(given && unreduced_)) return {};
  slot.averaged = {};
  slot.unsynced = given;
  if (given) return contiguous(to(to(grad, reduce_dtype()), group_.compute_device()));
  if (held == Held::average)
    check_writeback("gradient", group_.spec().names[slot.first], slot.leaf.shape(), grad.shape());
  return {};
}

/// `.grad` shows again what it did before.
void Gradients::end_own_sum(Slot& slot) const {
  own_sum(slot);
  if (std::exchange(slot.unsynced, false)) slot.leaf.set_grad(std::exchange(slot.averaged, {}));
}

bool Gradients::own(std::size_t member) const {
  const auto slot = std::ranges::find_if(slots_, [&](const Slot& s) { return member < s.last; });
  const Held held = held_in(*slot, slot->leaf.grad());
  return held == Held::own_sum || held == Held::own_given;
}

void Gradients::zeroed(std::size_t member) {
  for (Slot& slot : slots_)
    if (slot.first <= member && member < slot.last)
      slot.averaged = {}, slot.averages.clear(), slot.zeroed = true;
}

Tensor Gradients::average_in(const Slot& slot) { return slot.unsynced ? slot.averaged : slot.leaf.grad(); }

std::vector<std::int64_t> Gradients::averages() const {
  std::vector<std::int64_t> held;
  for (const Slot& slot : slots_)
    held.push_back(slot.leaf.numel() == 0 ? no_number : slot.averages.number(slot.leaf, average_in(slot)));
  held.push_back(summed_.defined() ? sums_ : 0);
  return held;
}

bool Gradients::any(const Slot& slot, std::span<const Tensor> parts) {
  return std::any_of(parts.begin() + static_cast<std::ptrdiff_t>(slot.first),
                     parts.begin() + static_cast<std::ptrdiff_t>(slot.last),
                     [](const Tensor& t) { return t.defined(); });
}

/// Where no rank used it and others of the group were used.
bool Gradients::has_zeros(const Slot& slot) const {
  return group_.spec().unused == Unused::zeros && slot.leaf.requires_grad();
}

/// The members' parts as one gradient of the slot, in memory of its own.
Tensor Gradients::laid_out(const Slot& slot, std::span<Tensor> parts, DType via,
                           const TensorOptions& as) const {
  if (!group_.spec().one_flat_param) {
    const Tensor cast = to(to(to(std::exchange(parts[slot.first], {}), via), as.dtype), as.device);
    return alone(cast) ? cast : clone(cast);
  }
  const Tensor all = zeros(slot.shape, as);
  for (std::size_t i = slot.first; i < slot.last; ++i)
    if (parts[i].defined()) copy_(alias(all, in_slot(slot, i)), to(std::exchange(parts[i], {}), via));
  return all;
}

/// A sum stays in the dtype that its first gradients came in.
void Gradients::commit_own() {
  const DType first = group_.spec().layout == GroupLayout::flat ? own_ : reduce_dtype();
  std::vector<Tensor> parts;
  for (Member& m : members_) parts.push_back(std::exchange(m.gradient, {}));
  const bool used = std::ranges::any_of(parts, &Tensor::defined);
  for (Slot& slot : slots_) {
    const bool mine = any(slot, parts);
    if (!mine && !(used && has_zeros(slot))) continue;
    const Tensor sum = own_sum(slot);
    const DType dtype = sum.defined() ? sum.dtype() : first;
    const TensorOptions as{dtype, group_.compute_device()};
    const Tensor fresh = mine ? laid_out(slot, parts, dtype, as) : zeros(slot.shape, as);
    if (!sum.defined()) slot.averaged = slot.leaf.grad();
    slot.leaf.set_grad(sum.defined() ? add_(sum, fresh) : fresh);
    slot.shown = slot.leaf.grad().storage().id();
    slot.unsynced = slot.added = true;
  }
}

// ---- averages ----

/// This rank's gradients, with what it kept to itself so far; empty where it has none.
std::vector<Tensor> Gradients::totals() {
  std::vector<Tensor> totals;
  for (Slot& slot : slots_) {
    const Tensor sum = own_sum(slot);
    for (std::size_t i = slot.first; i < slot.last; ++i) {
      Tensor own;
      if (sum.defined()) {
        sherd::Layout layout = in_slot(slot, i);
        layout.offset += sum.layout().offset;
        own = alias(sum, std::move(layout));
      }
      Tensor fresh = std::exchange(members_[i].gradient, {});
      totals.push_back(!own.defined()    ? fresh
                       : fresh.defined() ? add(own, to(fresh, own.dtype()))
                                         : clone(own));
    }
  }
  return totals;
}

/// Gradients go where their parameters lie in the gathered segment, by copies still to be made; elsewhere are
/// zeros.
void Gradients::lay_into(const Tensor& region, int segment, std::span<const Tensor> totals,
                         Copies& copies) const {
  const GroupSpec& spec = group_.spec();
  std::int64_t filled = 0;
  for (std::size_t i = 0; i < totals.size(); ++i)
    if (spec.partition.span(static_cast<int>(i)).segment == segment && totals[i].defined())
      filled += totals[i].numel();
  if (filled < region.numel()) zero_(region);
  for (std::size_t i = 0; i < totals.size(); ++i) {
    const ParameterSpan& span = spec.partition.span(static_cast<int>(i));
    if (span.segment != segment || !totals[i].defined()) continue;
    const Shape& shape = spec.shapes[i];
    copies.into.push_back(
        alias(region, {shape, contiguous_strides(shape), region.layout().offset + span.offset}));
    copies.from.push_back(totals[i]);
  }
}

/// For every rank's slice, one element a slot: whether this rank has a gradient.
void Gradients::mark_present(const Tensor& present, std::span<const Tensor> totals) {
  const auto has = [&](const Slot& slot) { return any(slot, totals); };
  complete_ = std::ranges::all_of(slots_, has);
  fill_(present, complete_ ? 1 : 0);
  const auto flags = static_cast<std::int64_t>(slots_.size());
  for (std::int64_t s = 0; s < flags && !complete_; ++s)
    if (has(slots_[static_cast<std::size_t>(s)]))
      fill_(alias(present, {{group_.spec().partition.ranks()}, {flags}, present.layout().offset + s}), 1);
}

bool Gradients::in_two_calls() const {
  const Ranks& ranks = group_.spec().ranks;
  return ranks.shard.defined() && ranks.replicas.defined();
}

/// Every segment's gradient over all ranks, zeros where this rank has none, and for every slot whether
/// it has one. A gradient that is its segment as it lies travels from where it is, unless others see its
/// memory, who may write it while peers read.
Collective Gradients::reduction(std::vector<Tensor> totals) {
  const GroupSpec& spec = group_.spec();
  const Partition& partition = spec.partition;
  const std::int64_t ranks = partition.ranks(), flags = static_cast<std::int64_t>(slots_.size());
  const DType dtype = reduce_dtype();
  const TensorOptions like{divided_here() ? compute_dtype(dtype) : dtype, group_.compute_device()};
  if (like.dtype != dtype)
    for (Tensor& t : totals)
      if (t.defined()) t = to(t, dtype);  // a rank's part is rounded, sums are not
  const bool per_parameter = spec.layout == GroupLayout::per_parameter;
  const auto fits = [&](int s) {
    const Tensor& t = totals[static_cast<std::size_t>(s)];
    return per_parameter && t.defined() && t.dtype() == like.dtype && alone(t) &&
           t.numel() == partition.gathered_numel(s);
  };
  std::int64_t buffered = flags * ranks;
  for (int s = 0; s < partition.segments(); ++s) buffered += fits(s) ? 0 : partition.gathered_numel(s);
  const Tensor buffer = empty({buffered}, like);
  reduced_ = empty({partition.shard_numel() + flags}, like);

  Collective c{
      .kind = spec.ranks.shard.defined() ? CollectiveKind::reduce_scatter : CollectiveKind::all_reduce,
      .inputs = {},
      .outputs = {},
      .reduction = divided_here() ? ReduceOp::sum() : ReduceOp::average(),
      .channel = reduce_channel,
      .label = spec.ranks.shard.defined() ? called_->among_shard() : called_->among_replicas()};
  std::int64_t at = 0;
  Copies copies;
  for (int s = 0; s < partition.segments(); ++s) {
    c.outputs.push_back(flat_view(reduced_, partition.shard_offset(s), partition.shard_numel(s)));
    if (fits(s)) {
      const Tensor& t = totals[static_cast<std::size_t>(s)];
      c.inputs.push_back(flat_view(t, 0, t.numel()));
      continue;
    }
    const Tensor region = flat_view(buffer, at, partition.gathered_numel(s));
    at += partition.gathered_numel(s);
    lay_into(region, s, totals, copies);
    c.inputs.push_back(region);
  }
  copy_each_(copies.into, copies.from);
  const Tensor present = flat_view(buffer, at, flags * ranks);
  mark_present(present, totals);
  c.inputs.push_back(present);
  c.outputs.push_back(flat_view(reduced_, partition.shard_numel(), flags));
  return c;
}

void Gradients::add_to(Slot& slot, const Tensor& part) {
  const Tensor held = slot.leaf.grad();  // the user's may be of any dtype and lie anywhere
  slot.leaf.set_grad(held.defined() ? add_(to(to(held, part.dtype()), part.device()), part) : part);
  slot.averages.put(slot.leaf, held.defined());
  slot.added = true;
  slot.zeroed = false;
}

/// One division, one rounding, as `ReduceOp` makes an average.
Tensor Gradients::divided(const Tensor& sum) const {
  const Ranks& ranks = group_.spec().ranks;
  const double by = divide_by_.value_or(RankOfGroup(ranks.shard).ranks * RankOfGroup(ranks.replicas).ranks);
  const DType dtype = reduce_dtype();
  return to(div(to(sum, compute_dtype(dtype)), by), dtype);
}

/// What the next backward that goes on to the replicas takes along.
void Gradients::commit_over_shards() {
  sums_ = summed_.defined() ? sums_ + 1 : 1;
  summed_ = std::exchange(reduced_, {});
  for (Slot& slot : slots_) end_own_sum(slot);
}

/// A rank without peers: its gradients are the sum.
void Gradients::commit_alone() {
  std::vector<Tensor> parts = offloaded() ? std::exchange(totals_, {}) : totals();
  if (divide_by_)
    for (Tensor& t : parts)
      if (t.defined()) t = divided(to(t, reduce_dtype()));
  const TensorOptions as{grad_dtype(), group_.shard().device()};
  const bool used = std::ranges::any_of(parts, &Tensor::defined);
  for (Slot& slot : slots_) {
    end_own_sum(slot);
    if (any(slot, parts))
      add_to(slot, laid_out(slot, parts, reduce_dtype(), as));
    else if (used && has_zeros(slot))
      add_to(slot, zeros(slot.leaf.shape(), as));
  }
}

void Gradients::commit_average() {
  summed_ = {};
  const Tensor result = std::exchange(average_, {});
  const bool used = std::ranges::any_of(present_, [](float p) { return p != 0; });
  for (std::size_t s = 0; s < slots_.size(); ++s) {
    Slot& slot = slots_[s];
    end_own_sum(slot);
    if (present_[s] == 0 && !(used && has_zeros(slot))) continue;
    if (elsewhere(slot)) continue;
    sherd::Layout layout = slot.leaf.layout();
    layout.offset += result.layout().offset - group_.shard().layout().offset;
    add_to(slot, alias(result, layout));
  }
}

}  // namespace sherd::shard
