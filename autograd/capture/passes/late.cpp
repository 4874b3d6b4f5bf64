#include "autograd/capture/passes/late.h"

#include <algorithm>

#include "autograd/capture/passes/rewrite.h"

namespace sherd {
namespace {

/// The new order of ops, to which they are added from the last one to the first: at the front, or right
/// before one that is there.
class OpOrder {
 public:
  static constexpr std::size_t none = ~std::size_t{0};

  explicit OpOrder(std::size_t ops) : next_(ops, none), before_(ops, none), label_(ops) {}
  void add_in_front(std::size_t op) {
    link(op, none, first_);
    label_[op] = next_[op] == none ? 0 : label_[next_[op]] - gap;
  }
  void add_before(std::size_t op, std::size_t next) {
    link(op, before_[next], next);
    if (before_[op] == none)
      label_[op] = label_[next] - gap;
    else if (label_[next] - label_[before_[op]] >= 2)
      label_[op] = label_[before_[op]] + (label_[next] - label_[before_[op]]) / 2;
    else
      label_all();
  }
  /// `none` is behind all.
  bool is_before(std::size_t a, std::size_t b) const {
    return a != none && (b == none || label_[a] < label_[b]);
  }
  std::vector<std::size_t> listed() const {
    std::vector<std::size_t> ops;
    for (std::size_t op = first_; op != none; op = next_[op]) ops.push_back(op);
    return ops;
  }

 private:
  static constexpr std::int64_t gap = std::int64_t{1} << 32;

  void link(std::size_t op, std::size_t before, std::size_t next) {
    before_[op] = before;
    next_[op] = next;
    (before == none ? first_ : next_[before]) = op;
    if (next != none) before_[next] = op;
  }
  void label_all() {
    std::int64_t label = 0;
    for (const std::size_t op : listed()) label_[op] = label += gap;
  }

  std::size_t first_ = none;
  std::vector<std::size_t> next_, before_;
  std::vector<std::int64_t> label_;  // grow along the order
};

/// Where ops go.
class Places {
 public:
  explicit Places(const Recorded& program)
      : trace_(program.trace),
        first_use_(trace_.storages.size(), none),
        last_use_(trace_.storages.size(), none),
        leaves_(trace_.storages.size()),
        foreign_(trace_.storages.size()),
        waits_anyway_(trace_.storages.size()),
        at_(trace_.ops.size()),
        order_(trace_.ops.size()) {
    for (const TracedTensor& t : program.outputs) leaves_[t.storage] = true;
    if (program.cut)
      for (const auto& [storage, number] : program.cut->made) leaves_[storage] = true;
    for (std::size_t s = 0; s < foreign_.size(); ++s)
      foreign_[s] = static_cast<bool>(trace_.storages[s].outside);
    for (const TracedTensor& t : program.inputs) foreign_[t.storage] = true;
    if (program.cut)  // the call's own, which goes after its last use
      for (const auto& [storage, number] : program.cut->kept) foreign_[storage] = false;
    for (std::size_t s = 0; s < foreign_.size(); ++s) waits_anyway_[s] = leaves_[s] || foreign_[s];
    find_barriers(program);
    for (std::size_t i = at_.size(); i-- > 0;) place(i);
  }

  std::vector<std::size_t> order() const { return order_.listed(); }
  /// The first op behind that stayed where it was, or the op itself if it did.
  std::size_t at(std::size_t op) const { return at_[op]; }

 private:
  static constexpr std::size_t none = OpOrder::none;

  /// Of two tensors from outside nobody knows whether they share memory.
  void find_barriers(const Recorded& program) {
    for (const Effect& effect : program.effects) barriers_.push_back(effect.before);
    for (std::size_t i = 0; i < trace_.ops.size(); ++i)
      for (std::size_t k = 0; k < trace_.ops[i].in.size(); ++k) {
        const std::uint32_t storage = trace_.ops[i].in[k].storage;
        if (storage != TracedTensor::none && trace_.ops[i].op->writes(k) && foreign_[storage])
          barriers_.push_back(i + 1);
      }
  }

  void place(std::size_t i) {
    const std::size_t reader = may_move(i) ? first_reader(i) : none;
    if (reader == none || crosses(i, at_[reader]) || makes_wait(i, reader)) {
      at_[i] = i;
      order_.add_in_front(i);
    } else {
      at_[i] = at_[reader];
      order_.add_before(i, reader);
    }
    each_tensor_of(trace_.ops[i], [&](const TracedTensor& t) {
      if (order_.is_before(i, first_use_[t.storage])) first_use_[t.storage] = i;
      if (last_use_[t.storage] == none || order_.is_before(last_use_[t.storage], i)) last_use_[t.storage] = i;
    });
  }

  bool may_move(std::size_t i) const {
    const TracedOp& traced = trace_.ops[i];
    if (traced.op->mutating() || traced.op->call_among_ranks() != nullptr || asks_owner(traced, trace_))
      return false;
    bool may = true;
    each_tensor_of(traced, [&](const TracedTensor& t) { may &= !trace_.storages[t.storage].rewritten; });
    return may && std::ranges::none_of(traced.out, [&](const TracedTensor& t) { return leaves_[t.storage]; });
  }
  std::size_t first_reader(std::size_t i) const {
    std::size_t first = none;
    for (const TracedTensor& t : trace_.ops[i].out)
      if (order_.is_before(first_use_[t.storage], first)) first = first_use_[t.storage];
    return first;
  }
  /// Whether what it reads may be another thing before op `at`.
  bool crosses(std::size_t i, std::size_t at) const {
    return std::ranges::any_of(trace_.ops[i].in,
                               [&](const TracedTensor& t) {
                                 return t.storage != TracedTensor::none && foreign_[t.storage];
                               }) &&
           std::ranges::any_of(barriers_, [&](std::size_t before) { return before > i && before <= at; });
  }
  /// Whether more memory would wait for it there than it gives.
  bool makes_wait(std::size_t i, std::size_t reader) const {
    const TracedOp& traced = trace_.ops[i];
    if (traced.op->is_view()) return false;
    std::vector<std::uint32_t> counted;
    std::size_t made = 0, waits = 0;
    for (const TracedTensor& t : traced.out) made += trace_.storages[t.storage].bytes;
    for (const TracedTensor& t : traced.in) {
      if (t.storage == TracedTensor::none || waits_anyway_[t.storage] ||
          (last_use_[t.storage] != none && !order_.is_before(last_use_[t.storage], reader)) ||
          std::ranges::find(counted, t.storage) != counted.end())
        continue;
      counted.push_back(t.storage);
      waits += trace_.storages[t.storage].bytes;
    }
    return waits > made;
  }

  const Trace& trace_;
  std::vector<std::size_t> first_use_, last_use_;  // by storage, in the new order of the ops behind
  std::vector<bool> leaves_;                       // by storage: to the caller or the other half
  std::vector<bool> foreign_;                      // by storage: others have its memory too
  std::vector<bool> waits_anyway_;                 // by storage: its memory is not let go of in the program
  std::vector<std::size_t> barriers_;              // ops before which what is foreign may change
  std::vector<std::size_t> at_;
  OpOrder order_;
};

}  // namespace

Recorded late(Recorded program) {
  const Places places(program);
  std::vector<TracedOp> ops;
  std::vector<std::size_t> place(program.trace.ops.size() + 1);
  std::size_t next = 0;
  for (const std::size_t i : places.order()) {
    for (; next <= places.at(i); ++next) place[next] = ops.size();
    ops.push_back(std::move(program.trace.ops[i]));
  }
  place.back() = ops.size();
  replace_ops(program, std::move(ops), place);
  return program;
}

}  // namespace sherd
