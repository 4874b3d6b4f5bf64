#include "autograd/capture/passes/copies.h"

#include <algorithm>
#include <iterator>
#include <optional>

#include "autograd/capture/costs.h"
#include "autograd/capture/passes/moves.h"
#include "autograd/capture/passes/rewrite.h"

namespace sherd {
namespace {

constexpr std::size_t most_ops = 16;        // of a copy
constexpr std::size_t most_work = 1 << 21;  // ops that are looked at, of which each copy looks at all

/// What a program holds at each op, and what could be let go of there.
class Held {
 public:
  static constexpr std::uint32_t none = TracedTensor::none;
  /// Ops `ops`, in order, once more before op `before`, which reads what `storage` held.
  struct Copy {
    std::uint32_t storage;
    std::uint32_t before;
    std::vector<std::uint32_t> ops;
    std::int64_t cost;
  };

  Held(const Recorded& program, const std::vector<std::int64_t>& costs)
      : trace_(program.trace),
        moves_(program),
        costs_(costs),
        makers_(trace_.storages.size(), none),
        uses_(trace_.storages.size()),
        bytes_(trace_.ops.size() + 1) {
    for (std::uint32_t i = 0; i < trace_.ops.size(); ++i)
      each_tensor_of(trace_.ops[i], [&](const TracedTensor& t) {
        if (uses_[t.storage].empty() || uses_[t.storage].back() != i) uses_[t.storage].push_back(i);
      });
    for (std::uint32_t s = 0; s < uses_.size(); ++s) {
      if (uses_[s].empty() || moves_.foreign(s)) continue;
      if (trace_.storages[s].maker != none) makers_[s] = uses_[s].front();
      bytes_[makers_[s] == none ? 0 : makers_[s]] += bytes_of(s);
      bytes_[moves_.leaves(s) ? trace_.ops.size() : uses_[s].back() + 1] -= bytes_of(s);
    }
    for (std::size_t i = 1; i < bytes_.size(); ++i) bytes_[i] += bytes_[i - 1];
  }

  /// The first op at which most is held.
  std::uint32_t fullest() const {
    return static_cast<std::uint32_t>(std::max_element(bytes_.begin(), bytes_.end() - 1) - bytes_.begin());
  }
  std::int64_t bytes(std::uint32_t op) const { return bytes_[op]; }

  /// The copy that costs least by the bytes that are let go of at op `at`, and puts no other op in its place.
  std::optional<Copy> best_at(std::uint32_t at) const {
    std::optional<Copy> best;
    double best_rate = 0;
    for (std::uint32_t s = 0; s < uses_.size(); ++s) {
      if (makers_[s] == none || makers_[s] >= at || bytes_of(s) == 0) continue;
      const auto next = std::ranges::lower_bound(uses_[s], at);
      if (next == uses_[s].end() || *next == at) continue;
      Copy copy{s, *next, {}, 0};
      std::int64_t extra = 0;
      if (!add(makers_[s], copy, extra) || bytes_[*next] + extra - bytes_of(s) >= bytes_[at]) continue;
      const double rate = static_cast<double>(copy.cost) / static_cast<double>(bytes_of(s));
      if (best && rate >= best_rate) continue;
      std::ranges::sort(copy.ops);
      best_rate = rate;
      best = std::move(copy);
    }
    return best;
  }

 private:
  std::int64_t bytes_of(std::uint32_t storage) const {
    return static_cast<std::int64_t>(trace_.storages[storage].bytes);
  }
  /// Adds op `i` and what it needs besides; false where one of them cannot run there.
  bool add(std::uint32_t i, Copy& copy, std::int64_t& extra) const {
    if (std::ranges::find(copy.ops, i) != copy.ops.end()) return true;
    const TracedOp& traced = trace_.ops[i];
    if (copy.ops.size() == most_ops || traced.once || traced.op->is_view() || !moves_.may_move(i) ||
        moves_.crosses(i, copy.before) ||
        !std::ranges::all_of(traced.out, [&](const TracedTensor& t) { return makers_[t.storage] == i; }))
      return false;
    copy.ops.push_back(i);
    copy.cost += costs_[i];
    for (const TracedTensor& t : traced.out) extra += bytes_of(t.storage);
    return std::ranges::all_of(traced.in, [&](const TracedTensor& t) {
      if (t.storage == none || is_held(t.storage, copy.before)) return true;
      return makers_[t.storage] != none && add(makers_[t.storage], copy, extra);
    });
  }
  bool is_held(std::uint32_t storage, std::uint32_t at) const {
    return moves_.foreign(storage) || moves_.leaves(storage) || uses_[storage].back() >= at;
  }

  const Trace& trace_;
  const Moves moves_;
  const std::vector<std::int64_t>& costs_;
  std::vector<std::uint32_t> makers_;             // by storage; none where no op of the program makes it
  std::vector<std::vector<std::uint32_t>> uses_;  // by storage: ops, the maker among them
  std::vector<std::int64_t> bytes_;               // by op
};

void apply(Recorded& program, std::vector<std::int64_t>& costs, const Held::Copy& copy) {
  std::vector<TracedStorage>& storages = program.trace.storages;
  std::vector<TracedOp>& ops = program.trace.ops;
  std::vector<std::uint32_t> copy_of(storages.size(), Held::none);
  std::vector<TracedOp> copies;
  std::vector<std::int64_t> their_costs;
  for (const std::uint32_t i : copy.ops) {
    for (const TracedTensor& t : ops[i].out) {
      copy_of[t.storage] = static_cast<std::uint32_t>(storages.size());
      storages.push_back(TracedStorage(storages[t.storage]));
    }
    TracedOp again = ops[i];
    each_tensor_of(again, [&](TracedTensor& t) {
      if (copy_of[t.storage] != Held::none) t.storage = copy_of[t.storage];
    });
    copies.push_back(std::move(again));
    their_costs.push_back(costs[i]);
  }
  for (std::size_t i = copy.before; i < ops.size(); ++i)
    each_tensor_of(ops[i], [&](TracedTensor& t) {
      if (t.storage == copy.storage) t.storage = copy_of[t.storage];
    });
  std::vector<std::size_t> place;
  for (std::size_t i = 0; i <= ops.size(); ++i) place.push_back(i + (i > copy.before ? copies.size() : 0));
  const auto before = static_cast<std::ptrdiff_t>(copy.before);
  costs.insert(costs.begin() + before, their_costs.begin(), their_costs.end());
  std::vector<TracedOp> all = std::move(ops);
  all.insert(all.begin() + before, std::make_move_iterator(copies.begin()),
             std::make_move_iterator(copies.end()));
  replace_ops(program, std::move(all), place);
}

}  // namespace

Copied copied_for_uses(Recorded program, const OpCosts& measured, std::int64_t less) {
  std::vector<std::int64_t> costs = costs_of(program.trace, measured);
  std::optional<std::int64_t> room;
  std::int64_t cost = 0;
  for (std::size_t work = 0; work < most_work; work += program.trace.ops.size() + 1) {
    std::optional<Held::Copy> copy;
    {
      const Held held(program, costs);
      const std::uint32_t at = held.fullest();
      if (!room) room = held.bytes(at) - less;
      if (held.bytes(at) > *room) copy = held.best_at(at);
    }
    if (!copy) return {std::move(program), cost};
    cost += copy->cost;
    apply(program, costs, *copy);
  }
  return {std::move(program), cost};
}

}  // namespace sherd
