#include "autograd/capture/partition.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>

#include "autograd/capture/min_cut.h"
#include "autograd/capture/passes/rewrite.h"
#include "runtime/fused_region.h"

namespace sherd {
namespace {

constexpr std::int64_t light_part = 16, heavy_times = 4;

class Partitioning {
 public:
  Partitioning(const Recorded& forward, const std::vector<KeptValue>& kept)
      : trace_(forward.trace), numbers_(trace_.storages.size(), none), makers_(trace_.storages.size(), none) {
    for (std::uint32_t i = 0; i < trace_.ops.size(); ++i)
      if (can_run_again(trace_.ops[i]) && bytes(trace_.ops[i].out[0].storage) > 0)
        makers_[trace_.ops[i].out[0].storage] = i;
    for (const KeptValue& value : kept) {
      if (!trace_.storages[value.storage].rewritten) numbers_[value.storage] = value.number;
      if (value.stays) makers_[value.storage] = none;
    }
  }

  std::vector<MadeAgain> run() {
    again_ = choose();
    std::vector<bool> wanted(trace_.ops.size());
    join_.resize(trace_.storages.size());
    std::iota(join_.begin(), join_.end(), 0);
    for (std::uint32_t s = 0; s < numbers_.size(); ++s)
      if (numbers_[s] != none && again_[s]) want(s, wanted);
    std::map<std::uint32_t, std::vector<std::uint32_t>> groups;  // of ops, by what they make
    for (std::uint32_t i = 0; i < wanted.size(); ++i)
      if (wanted[i]) groups[group_of(trace_.ops[i].out[0].storage)].push_back(i);
    std::vector<MadeAgain> all;
    for (const auto& [group, ops] : groups) all.push_back(extract(ops));
    return all;
  }

 private:
  static constexpr std::uint32_t none = TracedTensor::none;

  bool can_run_again(const TracedOp& traced) const {
    if (traced.out.size() != 1 || traced.in.empty() || traced.once || traced.op->is_view() ||
        asks_owner(traced, trace_))
      return false;
    const TracedTensor& in = traced.in[0];
    const bool is_light = ops::effort_of(*traced.op) || ops::row_sum(*traced.op, in.layout.shape, in.dtype);
    const auto written_once = [&](const TracedTensor& t) {
      return t.storage != none && !trace_.storages[t.storage].rewritten;
    };
    return is_light && !traced.op->mutating() && !trace_.storages[traced.out[0].storage].outside &&
           written_once(traced.out[0]) && std::ranges::all_of(traced.in, written_once);
  }
  std::int64_t bytes(std::uint32_t storage) const {
    return static_cast<std::int64_t>(trace_.storages[storage].bytes);
  }
  std::int64_t cost_of(const TracedOp& traced) const {
    const auto largest = [&](const std::vector<TracedTensor>& tensors) {
      std::int64_t most = 0;
      for (const TracedTensor& t : tensors) most = std::max(most, bytes(t.storage));
      return most;
    };
    const bool heavy = ops::effort_of(*traced.op) == ops::Effort::heavy;
    return heavy ? heavy_times * bytes(traced.out[0].storage) : largest(traced.in) / light_part + 1;
  }

  /// By storage: whether it is made again where it is wanted.
  std::vector<bool> choose() const {
    const std::size_t n = numbers_.size(), source = 2 * n, sink = 2 * n + 1;
    MinCut cut(2 * n + 2);
    for (std::uint32_t s = 0; s < n; ++s) {
      const bool is_kept = numbers_[s] != none;
      cut.add(2 * s, 2 * s + 1, is_kept ? bytes(s) : MinCut::never);
      if (is_kept) cut.add(2 * s + 1, sink, MinCut::never);
      cut.add(source, 2 * s, makers_[s] == none ? MinCut::never : cost_of(trace_.ops[makers_[s]]));
      if (makers_[s] == none) continue;
      for (const TracedTensor& t : trace_.ops[makers_[s]].in)
        cut.add(2 * t.storage + 1, 2 * s, MinCut::never);
    }
    const std::vector<bool> before = cut.run(source, sink);
    std::vector<bool> again(n);
    for (std::size_t s = 0; s < n; ++s) again[s] = !before[2 * s];
    return again;
  }

  /// The ops that make it, and what they read and is not kept.
  void want(std::uint32_t storage, std::vector<bool>& wanted) {
    std::vector<std::uint32_t> open{storage};
    while (!open.empty()) {
      const std::uint32_t op = makers_[open.back()];
      const std::uint32_t made = open.back();
      open.pop_back();
      for (const TracedTensor& t : trace_.ops[op].in) {
        if (!again_[t.storage]) continue;
        join_[group_of(t.storage)] = group_of(made);
        if (!wanted[makers_[t.storage]]) open.push_back(t.storage);
      }
      wanted[op] = true;
    }
  }
  std::uint32_t group_of(std::uint32_t storage) {
    while (join_[storage] != storage) storage = join_[storage] = join_[join_[storage]];
    return storage;
  }

  MadeAgain extract(const std::vector<std::uint32_t>& ops) const {
    MadeAgain part;
    std::map<std::uint32_t, std::uint32_t> index;
    for (const std::uint32_t i : ops) {
      TracedOp traced = trace_.ops[i];
      each_tensor_of(traced, [&](TracedTensor& t) {
        const auto [known, is_new] = index.try_emplace(t.storage, static_cast<std::uint32_t>(index.size()));
        if (is_new) {
          TracedStorage& storage = part.trace.storages.emplace_back(trace_.storages[t.storage]);
          storage.outside = {};
          storage.maker = again_[t.storage] ? static_cast<std::uint32_t>(part.trace.ops.size()) : none;
          if (!again_[t.storage])
            part.read.emplace_back(known->second, numbers_[t.storage]);
          else if (numbers_[t.storage] != none)
            part.made.emplace_back(known->second, numbers_[t.storage]);
        }
        t.storage = known->second;
      });
      part.trace.ops.push_back(std::move(traced));
    }
    return part;
  }

  const Trace& trace_;
  std::vector<std::uint32_t> numbers_;  // by storage: in the cut; none where it is not kept
  std::vector<std::uint32_t> makers_;   // by storage: the op that may make it again
  std::vector<bool> again_;
  std::vector<std::uint32_t> join_;  // by storage: another one of what hangs together
};

}  // namespace

std::vector<MadeAgain> partition(const Recorded& forward, const std::vector<KeptValue>& kept) {
  return Partitioning(forward, kept).run();
}

}  // namespace sherd
