// Calls among ranks as part of a recording: what a captured step needs of its calls.
#pragma once

#include <string_view>

#include "runtime/op.h"

namespace sherd {

/// An op of a captured step that is a call among ranks or waits for one.
struct CapturedCall {
  const AnyOp* op;
  Inputs in;
};

/// The calls of a captured step, which a device makes by itself when it runs the step's recording. Every rank
/// has the same calls; the hosts of all ranks meet once before each run, by `all`, and so find out whether they
/// are about to do the same. Used on the rank's thread.
class SHERD_API RecordedCalls {
 public:
  virtual ~RecordedCalls();
  /// Whether all ranks say `yes`: an ordinary call among them, with its faults.
  virtual bool all(bool yes) = 0;
  /// Whether the devices of all ranks, of which `device` is this one's, can meet each other. An ordinary call.
  virtual bool meet_on(Device device) = 0;
  /// The device begins to record the step.
  virtual void begin() = 0;
  /// Gives a call of the step to the device as part of what it records now. All are given in the order of the
  /// step; those that wait for another one have nothing left to do.
  virtual void record(const CapturedCall& call) = 0;
  /// This rank does not run what all have agreed to run: the group fails, and no device waits for this one.
  virtual void give_up(std::string_view why) noexcept = 0;
};

}  // namespace sherd
