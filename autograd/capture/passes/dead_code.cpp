#include "autograd/capture/passes/dead_code.h"

#include <algorithm>

#include "autograd/capture/passes/rewrite.h"

namespace sherd {
namespace {

/// What is read after a place in the program, which moves from the end to the beginning.
class Read {
 public:
  explicit Read(const Recorded& program)
      : trace_(program.trace),
        storages_(program.trace.storages.size()),
        values_(program.trace.storages.size()) {
    for (std::size_t s = 0; s < storages_.size(); ++s)
      storages_[s] = program.trace.storages[s].maker == TracedTensor::none;  // others have it
    if (program.cut)
      for (const auto& [storage, number] : program.cut->made) storages_[storage] = true;
    for (const TracedTensor& t : program.outputs) add(t);
  }

  bool needs(const TracedOp& traced) const {
    if (traced.out.empty() || traced.op->call_among_ranks() != nullptr || asks_owner(traced, trace_))
      return true;
    return std::ranges::any_of(traced.out, [&](const TracedTensor& t) {
      // A view gives no bytes: it is for who reads this part of the storage.
      return traced.op->is_view() ? has(t) : storages_[t.storage];
    });
  }
  void add(const TracedTensor& t) {
    storages_[t.storage] = true;
    if (!has(t)) values_[t.storage].push_back(t);
  }

 private:
  bool has(const TracedTensor& t) const {
    return std::ranges::any_of(values_[t.storage],
                               [&](const TracedTensor& other) { return same_value(t, other); });
  }
  const Trace& trace_;
  std::vector<bool> storages_;
  std::vector<std::vector<TracedTensor>> values_;  // by storage
};

}  // namespace

Recorded dead_code(Recorded program) {
  Read read(program);
  std::vector<bool> kept(program.trace.ops.size());
  for (std::size_t i = kept.size(); i-- > 0;) {
    const TracedOp& traced = program.trace.ops[i];
    kept[i] = read.needs(traced);
    if (!kept[i]) continue;
    for (const TracedTensor& t : traced.in)
      if (t.storage != TracedTensor::none) read.add(t);
  }
  keep_ops(program, kept);
  return program;
}

}  // namespace sherd
