#include "autograd/capture/passes/additions.h"

#include <algorithm>

#include "autograd/capture/passes/moves.h"
#include "autograd/capture/passes/rewrite.h"
#include "runtime/elementwise.h"
#include "runtime/in_parts.h"
#include "runtime/ops/arithmetic.h"

namespace sherd {
namespace {

/// Where a sum is made, and of what.
struct Sum {
  std::size_t at;
  TracedTensor first, second;
};

class Adding {
 public:
  explicit Adding(const Recorded& program)
      : trace_(program.trace), moves_(program), users_(trace_.storages.size()) {
    for (std::size_t i = 0; i < trace_.ops.size(); ++i)
      each_tensor_of(trace_.ops[i], [&](const TracedTensor& t) {
        auto& users = users_[t.storage];
        if (users.empty() || users.back() != i) users.push_back(i);
      });
  }

  /// The sum `t` of two tensors that lie alike, if op `reader` alone reads it and could read them.
  std::optional<Sum> sum_for(const TracedTensor& t, std::size_t reader) const {
    if (t.storage == TracedTensor::none) return {};
    const std::optional<std::size_t> maker = moves_.maker_for(t, reader);
    const std::size_t at = maker ? *maker : adds_in_place(t, reader).value_or(reader);
    if (at == reader) return {};
    const TracedOp& op = trace_.ops[at];
    if (!adds(op) || !alike(op.in[0], t) || !alike(op.in[1], t)) return {};
    return Sum{at, op.in[0], op.in[1]};
  }

 private:
  /// Two tensors, into the first or not: both forms have one kernel.
  static bool adds(const TracedOp& op) { return &op.op->kernels() == &kernel_row<ops::Add>(); }
  static bool alike(const TracedTensor& part, const TracedTensor& sum) {
    return part.storage != TracedTensor::none && part.dtype == sum.dtype &&
           part.layout.shape == sum.layout.shape;
  }
  /// The op that adds to `t` last, behind which `reader` alone has its storage.
  std::optional<std::size_t> adds_in_place(const TracedTensor& t, std::size_t reader) const {
    const std::vector<std::size_t>& users = users_[t.storage];
    if (users.size() < 2 || users.back() != reader || moves_.leaves(t.storage) || moves_.foreign(t.storage))
      return {};
    const auto reads_it = [&](const TracedTensor& in) { return in.storage == t.storage; };
    if (std::ranges::count_if(trace_.ops[reader].in, reads_it) != 1) return {};
    const std::size_t at = users[users.size() - 2];
    const TracedOp& op = trace_.ops[at];
    const bool last = op.op->mutating() && adds(op) && same_value(op.in[0], t) &&
                      op.in[1].storage != t.storage && !moves_.crosses(at, reader);
    return last ? std::optional(at) : std::nullopt;
  }

  const Trace& trace_;
  const Moves moves_;
  std::vector<std::vector<std::size_t>> users_;  // by storage: ops
};

}  // namespace

Recorded additions(Recorded program) {
  const Adding adding(program);
  std::vector<TracedOp> ops = program.trace.ops;
  std::vector<bool> stays(ops.size(), true);
  for (std::size_t i = 0; i < ops.size(); ++i) {
    TracedOp& reader = ops[i];
    if (reader.out.empty()) continue;
    const Device device = program.trace.storages[reader.out[0].storage].device;
    const std::optional<ops::InParts> parts = ops::in_parts(*reader.op, device.type);
    if (!parts || reader.in[parts->second].storage != TracedTensor::none) continue;
    const std::optional<Sum> sum = adding.sum_for(reader.in[parts->first], i);
    if (!sum) continue;
    reader.in[parts->first] = sum->first;
    reader.in[parts->second] = sum->second;
    stays[sum->at] = false;
  }
  program.trace.ops = std::move(ops);
  keep_ops(program, stays);
  return program;
}

}  // namespace sherd
