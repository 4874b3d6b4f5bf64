// The interface of what sees every op of a rank: the tape, tracers, profilers, memory trackers.
#pragma once

#include <cstdint>

#include "runtime/backend.h"

namespace sherd {

class AnyOp;

/// What is in memory that no op made.
enum class Content : std::uint8_t {
  none,   ///< whatever was there before (`empty`)
  given,  ///< values of the host's (`from_blob`, `Tensor::scalar`, `Tensor::from`)
};

/// Called by `apply` on the rank's own thread, for the ops that a program applies and not for those that a
/// kernel uses inside. To remember a storage beyond the call, keep its id: a handle would keep its memory
/// alive and count as another user.
class SHERD_API Listener {
 public:
  virtual ~Listener();
  /// Before an op that writes one of its inputs; may throw to refuse, and nothing is written then.
  virtual void before_write(const AnyOp& op, Inputs in);
  /// After the op ran.
  virtual void after(const AnyOp& op, Inputs in, Outputs out) = 0;
  /// A tensor was made by no op.
  virtual void made(const Tensor& tensor, Content content);
  /// Before the host reads values (`item`, `to_vector`, `data`, printing); may throw to refuse.
  virtual void host_read(const Tensor& tensor);
  /// A storage whose `id()` was ever asked for was destroyed on this thread.
  virtual void storage_gone(std::uint64_t id) noexcept;
};

}  // namespace sherd
