// Calls among ranks as part of a recording: what a captured step needs of its calls.
#pragma once

#include <cstdint>
#include <string_view>

#include "runtime/op.h"

namespace sherd {

/// An op of a captured step that is a call among ranks or waits for one.
struct CapturedCall {
  const AnyOp* op;
  Inputs in;
};

/// What ranks vote on, in this order: whether each has a plan for the recording, memory to meet in, that of
/// all others, and the recording; then, for each run, whether each is about to run it.
enum class Question : std::uint8_t { plan, memory, meeting, recording, run };
/// Of all ranks' votes the last one here counts. `not_now`: by the ordinary calls this time.
enum class Vote : std::uint8_t { yes, not_now, no };

/// The calls of a captured step, which a device makes by itself when it runs the step's recording. The hosts
/// of all ranks vote on each step in making the recording, and once before each run, and so find out whether
/// they are about to do the same. Used on the rank's thread.
class SHERD_API RecordedCalls {
 public:
  virtual ~RecordedCalls();
  /// What all ranks do: by ordinary calls among them, with their faults.
  virtual Vote vote(Question question, Vote mine) = 0;
  /// Whether the devices of all ranks, of which `device` is this one's, can meet each other. Votes too.
  virtual Vote meet_on(Device device) = 0;
  /// Whether the ranks still reach each other as they did when the devices met; else the recording is of no
  /// use.
  virtual bool current() const = 0;
  /// The device begins to record the step.
  virtual void begin() = 0;
  /// Gives a call of the step to the device as part of what it records now. All are given in the order of the
  /// step; those that wait for another one have nothing left to do.
  virtual void record(const CapturedCall& call) = 0;
  /// This rank does not run what all have agreed to run: the group fails, and no device waits for this one.
  virtual void give_up(std::string_view why) noexcept = 0;
};

}  // namespace sherd
