#include "autograd/capture/passes/late.h"

#include <algorithm>

#include "autograd/capture/passes/moves.h"
#include "autograd/capture/passes/rewrite.h"

namespace sherd {
namespace {

/// The new order of ops, to which they are added from the last one to the first: at the front, or right
/// before one that is there.
class ListOfOps {
 public:
  static constexpr std::size_t none = ~std::size_t{0};

  explicit ListOfOps(std::size_t ops) : next_(ops, none), before_(ops, none), label_(ops) {}
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
        moves_(program),
        first_use_(trace_.storages.size(), none),
        last_use_(trace_.storages.size(), none),
        at_(trace_.ops.size()),
        order_(trace_.ops.size()) {
    for (std::size_t i = at_.size(); i-- > 0;) place(i);
  }

  std::vector<std::size_t> order() const { return order_.listed(); }
  /// The first op behind that stayed where it was, or the op itself if it did.
  std::size_t at(std::size_t op) const { return at_[op]; }

 private:
  static constexpr std::size_t none = ListOfOps::none;

  void place(std::size_t i) {
    const std::size_t reader = moves_.may_move(i) ? first_reader(i) : none;
    if (reader == none || moves_.crosses(i, at_[reader]) || makes_wait(i, reader)) {
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

  std::size_t first_reader(std::size_t i) const {
    std::size_t first = none;
    for (const TracedTensor& t : trace_.ops[i].out)
      if (order_.is_before(first_use_[t.storage], first)) first = first_use_[t.storage];
    return first;
  }
  /// Whether more memory would wait for it there than it gives.
  bool makes_wait(std::size_t i, std::size_t reader) const {
    const TracedOp& traced = trace_.ops[i];
    if (traced.op->is_view()) return false;
    std::vector<std::uint32_t> counted;
    std::size_t made = 0, waits = 0;
    for (const TracedTensor& t : traced.out) made += trace_.storages[t.storage].bytes;
    for (const TracedTensor& t : traced.in) {
      if (t.storage == TracedTensor::none || waits_anyway(t.storage) ||
          (last_use_[t.storage] != none && !order_.is_before(last_use_[t.storage], reader)) ||
          std::ranges::find(counted, t.storage) != counted.end())
        continue;
      counted.push_back(t.storage);
      waits += trace_.storages[t.storage].bytes;
    }
    return waits > made;
  }

  /// Whether its memory is not let go of in the program.
  bool waits_anyway(std::uint32_t storage) const { return moves_.leaves(storage) || moves_.foreign(storage); }

  const Trace& trace_;
  const Moves moves_;
  std::vector<std::size_t> first_use_, last_use_;  // by storage, in the new order of the ops behind
  std::vector<std::size_t> at_;
  ListOfOps order_;
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
