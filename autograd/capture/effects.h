// What a captured step does beside its ops.
#pragma once

#include <functional>
#include <string>

#include "runtime/op.h"

namespace sherd {

/// Every replay of what this rank captures now calls `again` at this place of the step: for what code around
/// the ops must know of them, such as that kept copies of a tensor are old. Nothing where nothing is
/// captured.
void repeat_in_replays(const std::function<void()>& again);

/// The same of a frame of `compile` alone: what a sharded module does around its forward, which its ops and
/// calls among ranks are a part of, not of the program, in the grad mode of now. `name` stands in the
/// program's text. Called before the action itself, whose place in the order of recording it takes.
void repeat_in_frames(std::string name, const std::function<void()>& again);
/// The same of two that belong together. A replay that throws behind the first and before the second calls
/// `undo`, which may be empty, of the last one first.
void begin_in_frames(std::string name, const std::function<void()>& again, const std::function<void()>& undo);
void end_in_frames(std::string name, const std::function<void()>& again);

/// A frame of `compile` that is traced now cannot be a program; `why` says so.
void refuse_in_frames(const std::string& why);

/// The place in the order of recording where the call began whose frame is traced now; 0 without one.
std::uint64_t begin_of_frame();

/// What this rank captures now hears of an op that ran past the listeners (`run_again`), so that a program
/// runs it again too, and need not keep what it gives until then.
void tell_captures(const AnyOp& op, Inputs in, Outputs out);

/// Whether this rank captures a step whose program repeats its calls among ranks: not a frame of `compile`,
/// whose program has none, so that what comes to it makes the calls of an eager rank.
bool capturing_calls();

}  // namespace sherd
