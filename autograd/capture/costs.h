// What the ops of a trace cost, for a choice of which run again.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "autograd/op_costs.h"
#include "autograd/trace.h"

namespace sherd {

/// Elementwise, a cast or a sum of rows: it may run within another's loop.
bool is_light(const TracedOp& traced);

/// By op, in bytes that are moved. A light one costs a sixteenth of what it reads, a heavy elementwise one
/// four times what it writes, another what it moves and a byte for 32 operations of a product of such sizes.
/// What `measured` knows, unless it is light, costs its time in place of that: so many bytes as take as long
/// by the estimates of all that it knows of the trace.
std::vector<std::int64_t> costs_of(const Trace& trace, const OpCosts& measured);

/// By which `OpCosts` knows an op: of one without inputs by what it makes.
std::string cost_key(const AnyOp& op, SpecSpan inputs, SpecSpan outputs);

}  // namespace sherd
