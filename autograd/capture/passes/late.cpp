#include "autograd/capture/passes/late.h"

#include <algorithm>
#include <numeric>

#include "autograd/capture/passes/rewrite.h"

namespace sherd {
namespace {

/// Where ops go, found from the last one to the first.
class Places {
 public:
  explicit Places(const Recorded& program)
      : trace_(program.trace),
        first_use_(trace_.storages.size(), none),
        last_use_(trace_.storages.size(), 0),
        leaves_(trace_.storages.size()),
        foreign_(trace_.storages.size()),
        waits_anyway_(trace_.storages.size()),
        at_(trace_.ops.size()) {
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
  }

  /// By op: before which one it runs, or itself.
  const std::vector<std::size_t>& find() {
    for (std::size_t i = at_.size(); i-- > 0;) {
      at_[i] = place_of(i);
      each_tensor_of(trace_.ops[i], [&](const TracedTensor& t) {
        first_use_[t.storage] = std::min(first_use_[t.storage], at_[i]);
        last_use_[t.storage] = std::max(last_use_[t.storage], at_[i]);
      });
    }
    return at_;
  }

 private:
  static constexpr std::size_t none = ~std::size_t{0};

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

  std::size_t place_of(std::size_t i) const {
    const TracedOp& traced = trace_.ops[i];
    if (traced.out.empty() || traced.op->mutating() || traced.op->call_among_ranks() != nullptr ||
        asks_owner(traced, trace_))
      return i;
    std::size_t at = none;
    std::size_t made = 0, waits = 0;
    bool stays = false, reads_foreign = false;
    each_tensor_of(traced, [&](const TracedTensor& t) { stays |= trace_.storages[t.storage].rewritten; });
    for (const TracedTensor& t : traced.out) {
      at = std::min(at, first_use_[t.storage]);
      stays |= leaves_[t.storage];
      made += bytes(t.storage);
    }
    if (stays || at == none) return i;
    std::vector<std::uint32_t> counted;
    for (const TracedTensor& t : traced.in) {
      if (t.storage == TracedTensor::none) continue;
      reads_foreign |= foreign_[t.storage];
      if (waits_anyway_[t.storage] || last_use_[t.storage] >= at ||
          std::ranges::find(counted, t.storage) != counted.end())
        continue;
      counted.push_back(t.storage);
      waits += bytes(t.storage);
    }
    const bool crosses = reads_foreign && std::ranges::any_of(barriers_, [&](std::size_t before) {
                           return before > i && before <= at;
                         });
    return crosses || (waits > made && !traced.op->is_view()) ? i : at;
  }
  std::size_t bytes(std::uint32_t storage) const { return trace_.storages[storage].bytes; }

  const Trace& trace_;
  std::vector<std::size_t> first_use_, last_use_;  // by storage, of the ops behind
  std::vector<bool> leaves_;                       // by storage: to the caller or the other half
  std::vector<bool> foreign_;                      // by storage: others have its memory too
  std::vector<bool> waits_anyway_;                 // by storage: its memory is not let go of in the program
  std::vector<std::size_t> barriers_;              // ops before which what is foreign may change
  std::vector<std::size_t> at_;
};

}  // namespace

Recorded late(Recorded program) {
  const std::vector<std::size_t> at = Places(program).find();
  std::vector<std::size_t> order(at.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return at[i]; });
  std::vector<TracedOp> ops;
  std::vector<std::size_t> place(at.size() + 1);
  for (std::size_t next = 0; const std::size_t i : order) {
    // What came before op i and stayed there is done; what was moved to it comes behind that.
    for (; next <= at[i]; ++next) place[next] = ops.size();
    ops.push_back(std::move(program.trace.ops[i]));
  }
  place.back() = ops.size();
  replace_ops(program, std::move(ops), place);
  return program;
}

}  // namespace sherd
