// Memory that a call among ranks still uses when it has returned.
#pragma once

#include "runtime/export.h"

namespace sherd {

/// A call that has returned while peers may still read its inputs, and write its outputs. Used on the rank's
/// thread.
class SHERD_API LentCall {
 public:
  virtual ~LentCall();
  /// Whether the hosts are through with it, so that `wait` waits for none of them. Does not wait.
  virtual bool over() = 0;
  /// Returns when what the rank does from now on finds the memory its own again; once is enough for all of
  /// it.
  virtual void wait() = 0;
};

}  // namespace sherd
