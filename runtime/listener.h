// Whoever wants to see every op of a rank: the tape, the tracer, the profiler, a memory tracker.
#pragma once

#include <cstdint>

#include "runtime/backend.h"

namespace sherd {

class AnyOp;

/// Told by `apply` on the rank's own thread; what a kernel does inside is not heard. A listener that outlives
/// the call keeps storage ids, never handles.
class SHERD_API Listener {
 public:
  virtual ~Listener();
  /// Before an op that writes one of its inputs; may throw to refuse.
  virtual void before_write(const AnyOp& op, Inputs in);
  /// After the op ran.
  virtual void after(const AnyOp& op, Inputs in, Outputs out) = 0;
  /// Before the host reads values (`item`, `to_vector`, `data`, printing); may throw to refuse.
  virtual void host_read(const Tensor& tensor);
  /// A storage whose id somebody asked for died on this thread.
  virtual void storage_gone(std::uint64_t id) noexcept;
};

}  // namespace sherd
