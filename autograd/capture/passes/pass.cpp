#include "autograd/capture/passes/pass.h"

#include <algorithm>

namespace sherd {
namespace {

std::vector<Ref<const AnyOp>> calls_among_ranks(const Trace& trace) {
  std::vector<Ref<const AnyOp>> calls;
  for (const TracedOp& traced : trace.ops)
    if (traced.op->call_among_ranks() != nullptr) calls.push_back(traced.op);
  return calls;
}

}  // namespace

Recorded run_passes(Recorded program, std::span<const Pass> passes) {
  const std::vector<Ref<const AnyOp>> calls = calls_among_ranks(program.trace);
  for (const Pass& pass : passes) {
    program = pass.run(std::move(program));
    const std::vector<Ref<const AnyOp>> now = calls_among_ranks(program.trace);
    const auto name = [](const std::vector<Ref<const AnyOp>>& of, std::size_t i) {
      return i < of.size() ? of[i]->name() : "none";
    };
    for (std::size_t i = 0; i < std::max(calls.size(), now.size()); ++i)
      check<InternalError>(i < calls.size() && i < now.size() && calls[i] == now[i],
                           "pass {}: call {} among ranks was {} and is {}; a pass leaves calls as they are",
                           pass.name, i, name(calls, i), name(now, i));
  }
  return program;
}

}  // namespace sherd
