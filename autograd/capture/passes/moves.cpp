#include "autograd/capture/passes/moves.h"

#include <algorithm>

#include "autograd/capture/passes/rewrite.h"
#include "runtime/ops/cross_entropy.h"
#include "runtime/ops/index.h"
#include "runtime/ops/multinomial.h"
#include "runtime/ops/nll.h"
#include "runtime/ops/picking.h"

namespace sherd {
namespace {

/// Whether values that it is given may have an op throw: positions, targets, weights of draws.
bool looks_at_values(const AnyOp& op) {
  static const KernelRow* const all[] = {
      &kernel_row<ops::Take>(),         &kernel_row<ops::PutAt>(), &kernel_row<ops::ElementNumbers>(),
      &kernel_row<ops::CrossEntropy>(), &kernel_row<ops::Nll>(),   &kernel_row<ops::Multinomial>(),
      &kernel_row<ops::ManyDraws>()};
  return std::ranges::find(all, &op.kernels()) != std::end(all);
}

}  // namespace

Moves::Moves(const Recorded& program)
    : trace_(program.trace),
      leaves_(trace_.storages.size()),
      foreign_(trace_.storages.size()),
      writers_(trace_.storages.size()),
      makers_(trace_.storages.size()),
      uses_(trace_.storages.size()) {
  for (std::size_t i = 0; i < trace_.ops.size(); ++i)
    each_tensor_of(trace_.ops[i], [&](const TracedTensor& t) {
      if (!makers_[t.storage]) makers_[t.storage] = i;
      ++uses_[t.storage];
    });
  for (const TracedTensor& t : program.outputs) leaves_[t.storage] = true;
  if (program.cut)
    for (const auto& [storage, number] : program.cut->made) leaves_[storage] = true;
  for (std::size_t s = 0; s < foreign_.size(); ++s)
    foreign_[s] = static_cast<bool>(trace_.storages[s].outside);
  for (const TracedTensor& t : program.inputs) foreign_[t.storage] = true;
  if (program.cut)  // the call's own, which goes after its last use
    for (const auto& [storage, number] : program.cut->kept) foreign_[storage] = false;
  for (const Effect& effect : program.effects) barriers_.push_back(effect.before);
  for (std::size_t i = 0; i < trace_.ops.size(); ++i)
    for (std::size_t k = 0; k < trace_.ops[i].in.size(); ++k) {
      const std::uint32_t storage = trace_.ops[i].in[k].storage;
      if (storage == TracedTensor::none || !trace_.ops[i].op->writes(k)) continue;
      writers_[storage].push_back(i);
      if (foreign_[storage]) barriers_.push_back(i + 1);
    }
}

bool Moves::may_move(std::size_t i) const {
  const TracedOp& traced = trace_.ops[i];
  if (traced.op->mutating() || traced.op->call_among_ranks() != nullptr || asks_owner(traced, trace_))
    return false;
  return std::ranges::none_of(traced.out, [&](const TracedTensor& t) {
    return leaves_[t.storage] || trace_.storages[t.storage].rewritten;
  });
}

std::optional<std::size_t> Moves::maker_for(const TracedTensor& t, std::size_t reader) const {
  if (t.storage == TracedTensor::none || uses_[t.storage] != 2 || *makers_[t.storage] >= reader) return {};
  const std::size_t maker = *makers_[t.storage];
  const TracedOp& op = trace_.ops[maker];
  const bool whole = !op.once && !op.op->is_view() && op.out.size() == 1 && same_value(op.out[0], t);
  return whole && may_move(maker) && !crosses(maker, reader) ? std::optional(maker) : std::nullopt;
}

bool Moves::crosses(std::size_t i, std::size_t at) const {
  const auto writes_between = [&](std::size_t writer) { return writer > i && writer < at; };
  const auto changes_between = [&](std::size_t before) { return before > i && before <= at; };
  // Who catches what it throws finds what eager code had written by then.
  if (looks_at_values(*trace_.ops[i].op) && std::ranges::any_of(barriers_, changes_between)) return true;
  return std::ranges::any_of(trace_.ops[i].in, [&](const TracedTensor& t) {
    return t.storage != TracedTensor::none &&
           (std::ranges::any_of(writers_[t.storage], writes_between) ||
            (foreign_[t.storage] && std::ranges::any_of(barriers_, changes_between)));
  });
}

}  // namespace sherd
