// What passes do to a program's list of ops, so that what counts in ops stays right.
#pragma once

#include <cstdint>
#include <vector>

#include "autograd/capture/recorded.h"

namespace sherd {

/// Whether two tensors of one trace are the same part of the same storage.
bool same_value(const TracedTensor& a, const TracedTensor& b);

/// Whether an op, or a view, is of memory that an owner brings, of which the owner hears at that place: it may
/// make calls.
bool asks_owner(const TracedOp& op, const Trace& trace);

/// `at(tensor)` for each tensor that the op is given or gives.
template <class Op, class F>
void each_tensor_of(Op& op, const F& at) {
  for (auto* list : {&op.in, &op.out})
    for (auto& t : *list)
      if (t.storage != TracedTensor::none) at(t);
}

/// Makes `ops` the program's. `place[i]` is where in them what came of its op i begins; for one past its last
/// op it is their number. A storage that an op made has some `maker`; which, this finds anew.
void replace_ops(Recorded& program, std::vector<TracedOp> ops, const std::vector<std::size_t>& place);
/// Leaves the ops i for which `kept[i]`.
void keep_ops(Recorded& program, const std::vector<bool>& kept);

}  // namespace sherd
