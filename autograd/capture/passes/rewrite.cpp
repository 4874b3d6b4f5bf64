#include "autograd/capture/passes/rewrite.h"

#include <algorithm>

#include "autograd/capture/resident.h"

namespace sherd {
namespace {

/// Who makes, writes and uses each storage.
void look_at_storages(Recorded& program) {
  std::vector<TracedStorage>& storages = program.trace.storages;
  std::vector<bool> used(storages.size());
  std::vector<std::uint32_t> first(storages.size(), TracedTensor::none);
  for (TracedStorage& storage : storages) storage.rewritten = false;
  for (std::uint32_t i = 0; i < program.trace.ops.size(); ++i) {
    const TracedOp& traced = program.trace.ops[i];
    each_tensor_of(traced, [&](const TracedTensor& t) {
      used[t.storage] = true;
      if (first[t.storage] == TracedTensor::none) first[t.storage] = i;
    });
    for (std::size_t k = 0; k < traced.in.size(); ++k)
      if (traced.op->writes(k) && traced.in[k].storage != TracedTensor::none)
        storages[traced.in[k].storage].rewritten = true;
  }
  for (const TracedTensor& t : program.outputs) used[t.storage] = true;
  for (std::size_t s = 0; s < storages.size(); ++s) {
    if (storages[s].maker != TracedTensor::none) storages[s].maker = first[s];
    if (!used[s]) storages[s].outside = {};
  }
}

}  // namespace

bool asks_owner(const TracedOp& op, const Trace& trace) {
  return std::ranges::any_of(op.in, [&](const TracedTensor& t) {
    if (t.storage == TracedTensor::none) return false;
    const Ref<Storage>& outside = trace.storages[t.storage].outside;
    return outside && is_brought(*outside);
  });
}

bool same_value(const TracedTensor& a, const TracedTensor& b) {
  return a.storage == b.storage && a.dtype == b.dtype && a.layout.offset == b.layout.offset &&
         a.layout.shape == b.layout.shape && a.layout.strides == b.layout.strides;
}

void replace_ops(Recorded& program, std::vector<TracedOp> ops, const std::vector<std::size_t>& place) {
  program.trace.ops = std::move(ops);
  for (Effect& effect : program.effects) effect.before = place[effect.before];
  look_at_storages(program);
}

void keep_ops(Recorded& program, const std::vector<bool>& kept) {
  std::vector<TracedOp> ops;
  std::vector<std::size_t> place;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    place.push_back(ops.size());
    if (kept[i]) ops.push_back(std::move(program.trace.ops[i]));
  }
  place.push_back(ops.size());
  replace_ops(program, std::move(ops), place);
}

}  // namespace sherd
