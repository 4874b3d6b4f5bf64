#include "autograd/capture/passes/fuse.h"

#include <algorithm>
#include <functional>
#include <list>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <utility>

#include "autograd/capture/passes/rewrite.h"
#include "runtime/fused_region.h"

namespace sherd {
namespace {

using ops::Lies;
using ops::Region;
using ops::RowSpace;

constexpr std::size_t most_members = 64;
/// Ops after its last one that a region waits for another: what it reads lives on meanwhile.
constexpr std::size_t patience = 8;

bool is_dense(const Layout& layout) {
  return layout.offset == 0 && layout.strides == contiguous_strides(layout.shape);
}

/// The axes of a tensor from the one with the longest steps on, where that is another order than their own.
std::vector<int> order_in_memory(const Layout& layout) {
  std::vector<int> order(static_cast<std::size_t>(layout.shape.rank()));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater<>{}, [&](int axis) { return layout.strides[axis]; });
  return std::ranges::is_sorted(order) ? std::vector<int>{} : order;
}
/// A tensor, broadcast to as many axes, as one with them in that order.
TracedTensor turned(TracedTensor t, std::span<const int> order) {
  const Layout from = std::exchange(t.layout, {{}, {}, t.layout.offset});
  const int extra = static_cast<int>(order.size()) - from.shape.rank();
  for (const int axis : order) {
    t.layout.shape.push_back(axis < extra ? 1 : from.shape[axis - extra]);
    t.layout.strides.push_back(axis < extra ? 0 : from.strides[axis - extra]);
  }
  return t;
}

/// A region that still grows. Elementwise ops on images whose channels lie last, and on whatever else lies
/// dense in another order of axes, are one whose space has the axes in that order: its tensors are views of
/// theirs.
class Growing {
 public:
  Growing(const Trace& trace, const TracedTensor& space, std::vector<int> order, Device device)
      : trace_(trace), device_(device), order_(std::move(order)) {
    region_->space.shape = seen(space).layout.shape;
  }

  /// Takes op `i` as a member if it can be one. One alone may ask an owner: the region does so at that one's
  /// place.
  bool take(std::size_t i) {
    const TracedOp& traced = trace_.ops[i];
    const bool asks = asks_owner(traced, trace_);
    if (members_.size() == most_members || device_of(traced) != device_ ||
        (asks && (asking_ || traced.op->mutating())))
      return false;
    if (!order_.empty() && !can_turn(traced)) return false;
    std::optional<Joining> joining = look_at(order_.empty() ? traced : seen(traced), i);
    if (!joining || (!members_.empty() && !relates(*joining))) return false;
    for (const TracedTensor& t : joining->inputs) {
      inputs_.push_back(t);
      region_->inputs.emplace_back(t.dtype, t.layout);
      region_->written.push_back(false);
    }
    if (asks) asking_ = i;
    lies_.resize(inputs_.size());
    for (const auto& [input, lies] : joining->lies_of)
      if (std::ranges::find(lies_[input], lies) == lies_[input].end()) lies_[input].push_back(lies);
    members_.push_back({i, std::move(joining->in), joining->lies, joining->columns});
    const TracedTensor& out = traced.out[0];
    if (traced.op->writes(0)) {
      const Value written = members_.back().in[0];
      if (!written.made) region_->written[written.number] = true;
      return true;
    }
    made_.emplace(out.storage, members_.size() - 1);
    return true;
  }

  /// Whether the op, which is none of the region's, may not run before it: one of them reads what the other
  /// writes.
  bool conflicts(const TracedOp& traced) const {
    for (std::size_t k = 0; k < traced.in.size(); ++k) {
      const std::uint32_t s = traced.in[k].storage;
      if (s != TracedTensor::none && (writes(s) || (traced.op->writes(k) && reads(s)))) return true;
    }
    return std::ranges::any_of(traced.out,
                               [&](const TracedTensor& t) { return writes(t.storage) || reads(t.storage); });
  }
  /// Whether the inputs that nobody uses later, which it holds while it waits, are no larger than the results
  /// so far that somebody does, which it need not make yet. `is_over(storage)`: nobody uses it later;
  /// `is_freed(storage)`: it is freed then, so neither the caller's nor what a backward keeps.
  template <class IsOver, class IsFreed>
  bool may_wait(const IsOver& is_over, const IsFreed& is_freed) const {
    std::size_t held = 0, made = 0;
    for (const auto& [storage, count] : count_uses()) {
      const std::size_t bytes = trace_.storages[storage].bytes;
      if (makes(storage))
        made += is_freed(storage) && !is_over(storage) ? bytes : 0;
      else
        held += is_freed(storage) && is_over(storage) ? bytes : 0;
    }
    return held <= made;
  }
  /// Whether it asks an owner, before who asks next.
  bool asks() const { return asking_.has_value(); }
  /// Whether a member made the storage.
  bool makes(std::uint32_t storage) const { return made_.contains(storage); }
  void add_view(std::size_t i) { views_.push_back(i); }
  std::size_t last() const { return members_.back().op; }

  /// Appends the region as one op, and views of what it gives. `is_used_elsewhere(storage, uses)`: whether
  /// others than these uses, of members, want a storage that a member made.
  template <class F>
  void put(std::vector<TracedOp>& ops, const F& is_used_elsewhere) {
    std::unordered_map<std::uint32_t, std::size_t> uses = count_uses();
    const auto is_given = [&](std::uint32_t storage) { return is_used_elsewhere(storage, uses[storage]); };
    if (members_.size() == 1)
      ops.push_back(trace_.ops[members_[0].op]);
    else
      ops.push_back(fused(is_given));
    for (const std::size_t view : views_)
      if (is_given(trace_.ops[view].in[0].storage)) ops.push_back(trace_.ops[view]);
  }

 private:
  /// A value: an input, or what a member made, by number among its kind.
  struct Value {
    bool made;
    std::size_t number;
    Layout layout;
  };
  struct Member {
    std::size_t op;
    std::vector<Value> in;
    Lies lies;             // its result
    std::int64_t columns;  // of it, or of the rows whose columns it sums; a sum of rows has none
  };
  /// What an op would be as a member.
  struct Joining {
    std::vector<Value> in{};
    std::vector<TracedTensor> inputs{};                   // new ones
    std::vector<std::pair<std::size_t, Lies>> lies_of{};  // inputs
    Lies lies = Lies::full;
    std::int64_t columns = 0;  // as of a member
    bool is_part = false;      // an operand is a part of each row that a member made
  };

  std::unordered_map<std::uint32_t, std::size_t> count_uses() const {
    std::unordered_map<std::uint32_t, std::size_t> uses;
    for (const Member& member : members_)
      each_tensor_of(trace_.ops[member.op], [&](const TracedTensor& t) { ++uses[t.storage]; });
    return uses;
  }
  Device device_of(const TracedOp& traced) const { return trace_.storages[traced.out[0].storage].device; }
  bool writes(std::uint32_t storage) const {
    if (makes(storage)) return true;
    for (std::size_t i = 0; i < inputs_.size(); ++i)
      if (region_->written[i] && inputs_[i].storage == storage) return true;
    return false;
  }
  bool reads(std::uint32_t storage) const {
    return std::ranges::any_of(inputs_, [&](const TracedTensor& t) { return t.storage == storage; });
  }

  TracedTensor seen(const TracedTensor& t) const {
    return order_.empty() || t.storage == TracedTensor::none ? t : turned(t, order_);
  }
  TracedOp seen(TracedOp traced) const {
    for (auto* list : {&traced.in, &traced.out})
      for (TracedTensor& t : *list) t = seen(t);
    return traced;
  }
  /// Whether the op does the same to tensors whose axes have another order.
  bool can_turn(const TracedOp& traced) const {
    const auto few_axes = [&](const TracedTensor& t) {
      return t.storage == TracedTensor::none || t.layout.shape.rank() <= static_cast<int>(order_.size());
    };
    return ops::effort_of(*traced.op) && std::ranges::all_of(traced.in, few_axes) &&
           traced.out[0].layout.shape.rank() == static_cast<int>(order_.size());
  }

  /// The op at `index`, with the tensors as the region sees them.
  std::optional<Joining> look_at(const TracedOp& traced, std::size_t index) const {
    const TracedTensor& out = traced.out[0];
    const bool writes = traced.op->writes(0);
    std::vector<Shape> shapes;
    for (const TracedTensor& t : traced.in) shapes.push_back(t.layout.shape);
    Joining joining;
    if (!ops::joins_regions(*traced.op, device_.type)) return {};
    if (ops::row_sum(*traced.op, shapes[0], traced.in[0].dtype)) {
      const std::optional<RowSpace> space = space_of_rows(shapes[0]);
      joining.lies = Lies::row;
      if (!space || !add_operand(traced.in[0], *space, shapes[0], false, joining)) return {};
    } else if (ops::column_sum(*traced.op, shapes[0], traced.in[0].dtype)) {
      joining.lies = Lies::column;
      joining.columns = shapes[0].back();
      if (!sums_columns_of(traced.in[0]) || !add_made(traced.in[0], joining)) return {};
    } else if (!ops::row_parts(*traced.op, shapes).empty()) {
      const std::optional<RowSpace> whole = space_of_rows(out.layout.shape);
      if (!whole) return {};
      joining.columns = whole->columns();
      for (std::size_t k = 0; k < traced.in.size(); ++k) {
        const std::optional<RowSpace> space = space_of_rows(shapes[k]);
        if (!space || !add_operand(traced.in[k], *space, shapes[k], false, joining)) return {};
      }
    } else {
      if (!ops::effort_of(*traced.op)) return {};  // a sum or a part of another kind
      const std::optional<RowSpace> space = ops::space_of_member(region_->space, out.layout.shape);
      if (!space) return {};
      const std::optional<Lies> lies = ops::lies_over(*space, out.layout, out.layout.shape);
      if (lies != Lies::full && lies != Lies::row) return {};
      if (*lies == Lies::row && space->columns() > ops::most_columns) return {};
      joining.lies = *lies;
      joining.columns = space->columns();
      for (std::size_t k = 0; k < traced.in.size(); ++k)
        if (!add_operand(traced.in[k], *space, out.layout.shape, writes && k == 0, joining)) return {};
    }
    if (!writes && (!is_dense(out.layout) || trace_.storages[out.storage].maker != index ||
                    trace_.storages[out.storage].outside))
      return {};
    // Rows of another length belong here only where they come of what the region has.
    const bool others = joining.columns != region_->space.columns() && joining.lies == Lies::full;
    if (others && !relates(joining)) return {};
    if ((others || joining.is_part) &&
        std::max(joining.columns, region_->space.columns()) > ops::most_columns)
      return {};
    return joining;
  }
  /// The space whose rows are those of a tensor of this shape.
  std::optional<RowSpace> space_of_rows(const Shape& shape) const {
    const std::optional<RowSpace> space = ops::space_of_member(region_->space, shape);
    const bool whole = space && space->shape.numel() == shape.numel() && space->columns() == shape.back();
    return whole && shape.back() <= ops::most_columns ? space : std::nullopt;
  }

  /// Whether it sums the columns of such rows, beside those that it sums already.
  bool sums_columns_of(const TracedTensor& t) const {
    const Shape& shape = t.layout.shape;
    std::size_t others = 0;
    for (const Member& member : members_) {
      if (member.lies != Lies::column) continue;
      const TracedTensor& other = trace_.ops[member.op].in[0];
      if (member.columns != shape.back() || other.dtype != t.dtype) return false;
      ++others;
    }
    return others < ops::most_column_sums &&
           ops::sums_columns(region_->space.rows(), shape.back(), t.dtype, device_.type);
  }
  /// Adds an operand that is all of what a member made for each element.
  bool add_made(const TracedTensor& t, Joining& joining) const {
    const std::optional<RowSpace> space = space_of_rows(t.layout.shape);
    const auto known = made_.find(t.storage);
    return space && known != made_.end() && members_[known->second].lies == Lies::full &&
           add_operand(t, *space, t.layout.shape, false, joining) && !joining.is_part;
  }

  bool add_operand(const TracedTensor& t, const RowSpace& space, const Shape& shape, bool written,
                   Joining& joining) const {
    if (t.storage == TracedTensor::none) return false;
    const std::optional<Lies> lies = ops::lies_over(space, t.layout, shape);
    if (!lies || (written && *lies != joining.lies)) return false;
    if (const auto known = made_.find(t.storage); known != made_.end()) {
      if (t.dtype != trace_.ops[members_[known->second].op].out[0].dtype ||
          !shows(t, *lies, shape, members_[known->second], joining) || (written && joining.is_part))
        return false;
      joining.in.push_back({true, known->second, t.layout});
      return true;
    }
    for (std::size_t i = 0; i < inputs_.size() + joining.inputs.size(); ++i) {
      const bool is_new = i >= inputs_.size();
      const TracedTensor& other = is_new ? joining.inputs[i - inputs_.size()] : inputs_[i];
      if (other.storage != t.storage) continue;
      if (same_value(other, t)) {
        joining.in.push_back({false, i, t.layout});
        joining.lies_of.emplace_back(i, *lies);
        const bool is_written = written || (!is_new && region_->written[i]);
        return !is_written || (stands_alone(i, joining) && lies_so(i, *lies, joining));
      }
      // Of two views of one memory neither may be written.
      if (written || (!is_new && region_->written[i])) return false;
    }
    joining.in.push_back({false, inputs_.size() + joining.inputs.size(), t.layout});
    joining.lies_of.emplace_back(inputs_.size() + joining.inputs.size(), *lies);
    joining.inputs.push_back(t);
    return true;
  }
  /// Whether what a member reads so is what another one made, or the same part of each of its rows.
  bool shows(const TracedTensor& t, Lies lies, const Shape& shape, const Member& maker,
             Joining& joining) const {
    if (maker.lies == Lies::column) return false;
    if (maker.lies == Lies::row)
      return t.layout.offset == 0 &&
             (lies == Lies::row || (region_->space.rows() == 1 && lies == Lies::number));
    if (lies == Lies::full && t.layout.offset == 0 &&
        t.layout.shape.numel() == region_->space.rows() * maker.columns)
      return true;
    joining.is_part = true;
    return ops::row_part({shape}, t.layout, maker.columns).has_value();
  }
  /// Whether it reads what a member made, or of what one reads: what has nothing to do with the region would
  /// hold its inputs, and they its results, for nothing.
  bool relates(const Joining& joining) const {
    return std::ranges::any_of(joining.in, [&](const Value& v) {
      return v.made || v.number < inputs_.size() || is_part_read(v, joining);
    });
  }
  bool is_part_read(const Value& v, const Joining& joining) const {
    return reads(joining.inputs[v.number - inputs_.size()].storage);
  }
  /// Whether all members have element i of the input at one place of the space.
  bool lies_so(std::size_t i, Lies lies, const Joining& joining) const {
    if (i < inputs_.size() && std::ranges::any_of(lies_[i], [&](Lies other) { return other != lies; }))
      return false;
    return std::ranges::all_of(joining.lies_of,
                               [&](const auto& use) { return use.first != i || use.second == lies; });
  }
  /// Whether no other input lies in the memory of this one.
  bool stands_alone(std::size_t i, const Joining& joining) const {
    const auto all = [&](std::size_t k) -> const TracedTensor& {
      return k < inputs_.size() ? inputs_[k] : joining.inputs[k - inputs_.size()];
    };
    for (std::size_t k = 0; k < inputs_.size() + joining.inputs.size(); ++k)
      if (k != i && all(k).storage == all(i).storage) return false;
    return true;
  }

  template <class F>
  TracedOp fused(const F& is_given) {
    const auto inputs = static_cast<std::uint32_t>(inputs_.size());
    const auto number_of = [&](const Value& v) {
      return static_cast<std::uint32_t>(v.made ? inputs + v.number : v.number);
    };
    const TracedOp& at = trace_.ops[asking_.value_or(members_.back().op)];
    TracedOp traced{{}, inputs_, {}, false, at.precision, at.recorded, at.place};
    for (std::size_t i = 0; i < inputs_.size(); ++i)
      if (region_->written[i]) traced.out.push_back(inputs_[i]);
    for (std::size_t m = 0; m < members_.size(); ++m) {
      const TracedOp& own = trace_.ops[members_[m].op];
      const TracedTensor out = seen(own.out[0]);
      Region::Member& member = region_->members.emplace_back();
      member.op = own.op;
      member.result = {out.layout.shape, out.dtype, device_};
      for (const Value& v : members_[m].in) member.in.push_back({number_of(v), v.layout});
      if (own.op->writes(0) || !is_given(out.storage)) continue;
      region_->results.push_back(inputs + static_cast<std::uint32_t>(m));
      traced.out.push_back(out);
    }
    traced.op = make_ref<const OpModel<ops::FusedRegion>>(ops::FusedRegion{region_});
    return traced;
  }

  const Trace& trace_;
  Device device_;
  std::vector<int> order_;  // of the axes, in which the region has them; none: in their own
  std::shared_ptr<Region> region_ = std::make_shared<Region>();
  std::vector<TracedTensor> inputs_;
  std::vector<std::vector<Lies>> lies_;  // by input: how members read it
  std::vector<Member> members_;
  std::unordered_map<std::uint32_t, std::size_t> made_;  // storages, by the member that made them
  std::vector<std::size_t> views_;
  std::optional<std::size_t> asking_;  // the op that asks an owner
};

class Fusing {
 public:
  explicit Fusing(Recorded program) : program_(std::move(program)), uses_(program_.trace.storages.size()) {
    for (const TracedOp& traced : ops())
      if (!traced.op->is_view()) each_tensor_of(traced, [&](const TracedTensor& t) { ++uses_[t.storage]; });
    for (const TracedTensor& t : program_.outputs) ++uses_[t.storage];
    freed_.resize(uses_.size());
    seen_.resize(uses_.size());
    for (std::size_t s = 0; s < freed_.size(); ++s)
      freed_[s] = program_.trace.storages[s].maker != TracedTensor::none;
    if (program_.cut) {
      for (const auto& [storage, number] : program_.cut->made) ++uses_[storage], freed_[storage] = false;
      for (const auto& [storage, number] : program_.cut->kept) freed_[storage] = true;
    }
    for (const TracedTensor& t : program_.outputs) freed_[t.storage] = false;
    for (const Effect& effect : program_.effects) effects_.push_back(effect.before);
    std::ranges::sort(effects_);
  }

  Recorded run() {
    std::vector<std::size_t> place;
    for (std::size_t i = 0; i < ops().size(); ++i) {
      if (std::ranges::binary_search(effects_, i)) end_all();
      while (!growing_.empty() && growing_.front().last() + patience < i) end(growing_.begin());
      place.push_back(done_.size());
      add(i);
      if (!ops()[i].op->is_view())
        each_tensor_of(ops()[i], [&](const TracedTensor& t) { ++seen_[t.storage]; });
    }
    end_all();
    place.push_back(done_.size());
    replace_ops(program_, std::move(done_), place);
    return std::move(program_);
  }

 private:
  const std::vector<TracedOp>& ops() const { return program_.trace.ops; }

  void add(std::size_t i) {
    const TracedOp& traced = ops()[i];
    if (traced.op->is_view()) {
      if (asks_owner(traced, program_.trace)) end_before(traced, growing_.end());
      const auto its =
          std::ranges::find_if(growing_, [&](const Growing& g) { return g.makes(traced.in[0].storage); });
      if (its != growing_.end()) return its->add_view(i);
      return done_.push_back(traced);
    }
    if (traced.op->call_among_ranks() != nullptr) end_all();
    // Others may know memory from outside by another storage, or look at it when an op behind throws.
    const bool writes_outside = writes_given(traced);
    if (writes_outside) end_all();
    const bool may_join = !writes_outside && traced.out.size() == 1 && !traced.in.empty() && !traced.once &&
                          traced.op->call_among_ranks() == nullptr;
    if (may_join && joined(i)) return end_what_holds(std::prev(growing_.end()));
    end_before(traced, growing_.end());
    end_what_holds(growing_.end());
    if (!may_join || !begun(i)) done_.push_back(traced);
  }
  bool writes_given(const TracedOp& traced) const {
    for (std::size_t k = 0; k < traced.in.size(); ++k)
      if (traced.op->writes(k) && traced.in[k].storage != TracedTensor::none &&
          program_.trace.storages[traced.in[k].storage].maker == TracedTensor::none)
        return true;
    return false;
  }
  /// Ends the regions that may not run behind the op, but for the one that took it. Owners hear who asks in
  /// the order of the step.
  void end_before(const TracedOp& traced, std::list<Growing>::iterator taker) {
    const bool asks = asks_owner(traced, program_.trace);
    for (auto its = growing_.begin(); its != growing_.end();) {
      const auto region = its++;
      if (region != taker && (region->conflicts(traced) || (asks && region->asks()))) end(region);
    }
  }

  /// Ends the regions that would hold memory while another op runs, but for the one that took it.
  void end_what_holds(std::list<Growing>::iterator taker) {
    const auto is_over = [&](std::uint32_t storage) { return seen_[storage] == uses_[storage]; };
    const auto is_freed = [&](std::uint32_t storage) { return freed_[storage]; };
    for (auto its = growing_.begin(); its != growing_.end();) {
      const auto region = its++;
      if (region != taker && !region->may_wait(is_over, is_freed)) end(region);
    }
  }

  /// Whether a region took op `i`.
  bool joined(std::size_t i) {
    for (auto region = growing_.end(); region != growing_.begin();) {
      if (!(--region)->take(i)) continue;
      end_before(ops()[i], region);
      growing_.splice(growing_.end(), growing_, region);  // in the order of their last members
      return true;
    }
    return false;
  }
  bool begun(std::size_t i) {
    const TracedOp& traced = ops()[i];
    const bool sums = ops::row_sum(*traced.op, traced.in[0].layout.shape, traced.in[0].dtype) != nullptr;
    const TracedTensor& space = sums ? traced.in[0] : traced.out[0];
    if (space.layout.shape.numel() == 0) return false;
    std::vector<int> order = sums ? std::vector<int>{} : order_in_memory(space.layout);
    Growing region(program_.trace, space, std::move(order),
                   program_.trace.storages[traced.out[0].storage].device);
    if (!region.take(i)) return false;
    growing_.push_back(std::move(region));
    return true;
  }

  void end(std::list<Growing>::iterator region) {
    region->put(done_, [&](std::uint32_t storage, std::size_t uses) { return uses_[storage] > uses; });
    growing_.erase(region);
  }
  void end_all() {
    while (!growing_.empty()) end(growing_.begin());
  }

  Recorded program_;
  std::vector<std::size_t> uses_;  // by storage: of ops, and of who has it after the program
  std::vector<std::size_t> seen_;  // the same of the ops so far
  std::vector<bool> freed_;        // by storage: after its last use
  std::vector<std::size_t> effects_;
  std::list<Growing> growing_;
  std::vector<TracedOp> done_;
};

}  // namespace

Recorded fuse(Recorded program) { return Fusing(std::move(program)).run(); }

}  // namespace sherd
