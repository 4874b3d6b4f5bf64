#include "autograd/capture/partition.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "autograd/capture/costs.h"
#include "autograd/capture/min_cut.h"
#include "autograd/capture/passes/rewrite.h"
#include "autograd/capture/resident.h"

namespace sherd {
/// What a choice runs again.
struct Partitioning::Wanted {
  std::vector<bool> ops;
  std::vector<bool> again;          // by storage: made by them
  std::vector<std::uint32_t> join;  // by storage: another one of what hangs together

  std::uint32_t group_of(std::uint32_t storage) {
    while (join[storage] != storage) storage = join[storage] = join[join[storage]];
    return storage;
  }
};

Partitioning::Partitioning(const Recorded& forward, const std::vector<KeptValue>& kept, MakesAgain which,
                           const OpCosts& measured)
    : trace_(forward.trace),
      costs_(costs_of(trace_, measured)),
      numbers_(trace_.storages.size(), none),
      makers_(trace_.storages.size(), none) {
  for (std::uint32_t i = 0; i < trace_.ops.size(); ++i)
    if (can_run_again(trace_.ops[i], which))
      for (const TracedTensor& t : trace_.ops[i].out)
        if (bytes(t.storage) > 0) makers_[t.storage] = i;
  for (const KeptValue& value : kept) {
    if (!trace_.storages[value.storage].rewritten) numbers_[value.storage] = value.number;
    const std::uint32_t op = makers_[value.storage];
    if (!value.stays || op == none) continue;
    for (const TracedTensor& t : trace_.ops[op].out) makers_[t.storage] = none;
  }
  if (which != MakesAgain::all) return;
  for (std::uint32_t s = 0; s < numbers_.size(); ++s) {
    const TracedStorage& storage = trace_.storages[s];
    if (numbers_[s] == none && !storage.rewritten && !(storage.outside && is_brought(*storage.outside)))
      numbers_[s] = first_other + s;
  }
}

bool Partitioning::can_run_again(const TracedOp& traced, MakesAgain which) const {
  if (traced.out.empty() || traced.in.empty() || traced.once || traced.op->is_view() ||
      traced.op->call_among_ranks() != nullptr || asks_owner(traced, trace_))
    return false;
  if (which == MakesAgain::small && (traced.out.size() != 1 || !is_light(traced))) return false;
  const auto written_once = [&](const TracedTensor& t) {
    return t.storage == none ? which == MakesAgain::all : !trace_.storages[t.storage].rewritten;
  };
  const auto made_here = [&](const TracedTensor& t) {
    return t.storage != none && written_once(t) && !trace_.storages[t.storage].outside;
  };
  return std::ranges::all_of(traced.in, written_once) && std::ranges::all_of(traced.out, made_here);
}

Partitioning::Choice Partitioning::cheapest(int quarters) const {
  static constexpr std::int64_t roots[] = {1024, 1218, 1448,
                                           1722};  // 1024 times the powers of the fourth root of 2
  const auto scaled = [&](std::int64_t cost) {
    return std::max<std::int64_t>(1, cost * roots[0] / roots[quarters % 4] >> (quarters / 4));
  };
  // Nodes: a value before and behind the arc that keeping it cuts, then ops.
  const std::size_t n = numbers_.size(), source = 2 * n + trace_.ops.size(), sink = source + 1;
  MinCut cut(sink + 1);
  std::vector<bool> known(trace_.ops.size());
  for (std::uint32_t s = 0; s < n; ++s) {
    const bool others_have_it = static_cast<bool>(trace_.storages[s].outside);
    cut.add(2 * s, 2 * s + 1, numbers_[s] == none ? MinCut::never : others_have_it ? 0 : bytes(s));
    if (is_read(s)) cut.add(2 * s + 1, sink, MinCut::never);
    if (makers_[s] == none) {
      cut.add(source, 2 * s, MinCut::never);
      continue;
    }
    const std::size_t op = 2 * n + makers_[s];
    cut.add(op, 2 * s, MinCut::never);
    if (known[makers_[s]]) continue;
    known[makers_[s]] = true;
    cut.add(source, op, scaled(costs_[makers_[s]]));
    for (const TracedTensor& t : trace_.ops[makers_[s]].in)
      if (t.storage != none) cut.add(2 * t.storage + 1, op, MinCut::never);
  }
  const std::vector<bool> before = cut.run(source, sink);
  Choice again(n);
  for (std::size_t s = 0; s < n; ++s) again[s] = !before[2 * s];
  return again;
}

Partitioning::Choice Partitioning::in_segments(std::size_t segments) const {
  const std::size_t ops = trace_.ops.size();
  constexpr std::size_t never = ~std::size_t{0};
  std::vector<std::size_t> made(numbers_.size(), never), last(numbers_.size());  // by storage, ops
  for (std::size_t i = 0; i < ops; ++i) {
    for (const TracedTensor& t : trace_.ops[i].out) made[t.storage] = std::min(made[t.storage], i);
    each_tensor_of(trace_.ops[i], [&](const TracedTensor& t) { last[t.storage] = i; });
  }
  std::vector<std::int64_t> crossing(ops + 1);  // bytes that are used on both sides of each op's beginning
  for (std::size_t s = 0; s < made.size(); ++s) {
    if (made[s] == never || last[s] == made[s]) continue;
    crossing[made[s] + 1] += bytes(static_cast<std::uint32_t>(s));
    crossing[last[s] + 1] -= bytes(static_cast<std::uint32_t>(s));
  }
  std::partial_sum(crossing.begin(), crossing.end(), crossing.begin());
  Choice again(numbers_.size());
  for (std::size_t s = 0; s < again.size(); ++s) again[s] = makers_[s] != none;
  for (std::size_t k = 1; k < segments; ++k) {
    const auto begin = crossing.begin() + static_cast<std::ptrdiff_t>(ops * (2 * k - 1) / (2 * segments)),
               end = crossing.begin() + static_cast<std::ptrdiff_t>(ops * (2 * k + 1) / (2 * segments));
    const auto place = static_cast<std::size_t>(std::min_element(begin, end) - crossing.begin());
    for (std::size_t s = 0; s < again.size(); ++s)
      if (made[s] < place && last[s] >= place) again[s] = false;
  }
  return again;
}

Partitioning::Choice Partitioning::mixed(const Choice& less, const Choice& more, std::size_t place) const {
  Choice mix = less;
  for (std::size_t s = 0; s < mix.size(); ++s)
    if (makers_[s] != none && makers_[s] < place) mix[s] = more[s];
  return mix;
}

/// The ops that make what is kept and made again, and what they read and is not kept.
Partitioning::Wanted Partitioning::wanted(const Choice& choice) const {
  Wanted wanted{std::vector<bool>(trace_.ops.size()), std::vector<bool>(numbers_.size()),
                std::vector<std::uint32_t>(numbers_.size())};
  std::vector<std::uint32_t> open;
  const auto want = [&](std::uint32_t op) {
    if (wanted.ops[op]) return;
    wanted.ops[op] = true;
    for (const TracedTensor& t : trace_.ops[op].out) wanted.again[t.storage] = true;
    open.push_back(op);
  };
  for (std::uint32_t s = 0; s < numbers_.size(); ++s)
    if (is_read(s) && choice[s]) want(makers_[s]);
  while (!open.empty()) {
    const TracedOp& traced = trace_.ops[open.back()];
    open.pop_back();
    for (const TracedTensor& t : traced.in)
      if (t.storage != none && (choice[t.storage] || numbers_[t.storage] == none)) want(makers_[t.storage]);
  }
  std::iota(wanted.join.begin(), wanted.join.end(), 0);
  for (std::size_t i = 0; i < trace_.ops.size(); ++i)
    if (wanted.ops[i])
      each_tensor_of(trace_.ops[i], [&](const TracedTensor& t) {
        if (wanted.again[t.storage])
          wanted.join[wanted.group_of(t.storage)] = wanted.group_of(trace_.ops[i].out[0].storage);
      });
  return wanted;
}

std::int64_t Partitioning::cost(const Choice& choice) const {
  const Wanted runs = wanted(choice);
  std::int64_t cost = 0;
  for (std::size_t i = 0; i < runs.ops.size(); ++i)
    if (runs.ops[i]) cost += costs_[i];
  return cost;
}

std::vector<MadeAgain> Partitioning::made_again(const Choice& choice) const {
  Wanted runs = wanted(choice);
  std::map<std::uint32_t, std::vector<std::uint32_t>> groups;  // of ops, by what they make
  for (std::uint32_t i = 0; i < runs.ops.size(); ++i)
    if (runs.ops[i]) groups[runs.group_of(trace_.ops[i].out[0].storage)].push_back(i);
  std::vector<MadeAgain> all;
  for (const auto& [group, ops] : groups) all.push_back(extract(ops, runs.again));
  return all;
}

MadeAgain Partitioning::extract(const std::vector<std::uint32_t>& ops, const std::vector<bool>& again) const {
  MadeAgain part;
  std::map<std::uint32_t, std::uint32_t> index;
  for (const std::uint32_t i : ops) {
    TracedOp traced = trace_.ops[i];
    each_tensor_of(traced, [&](TracedTensor& t) {
      const auto [known, is_new] = index.try_emplace(t.storage, static_cast<std::uint32_t>(index.size()));
      if (is_new) {
        TracedStorage& storage = part.trace.storages.emplace_back(trace_.storages[t.storage]);
        storage.outside = {};
        storage.maker = again[t.storage] ? static_cast<std::uint32_t>(part.trace.ops.size()) : none;
        if (!again[t.storage])
          part.read.emplace_back(known->second, numbers_[t.storage]);
        else if (is_read(t.storage))
          part.made.emplace_back(known->second, numbers_[t.storage]);
      }
      t.storage = known->second;
    });
    part.trace.ops.push_back(std::move(traced));
  }
  return part;
}

}  // namespace sherd
