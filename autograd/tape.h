// The listener that records ops whose inputs want gradients.
#pragma once

#include <string_view>

#include "autograd/node.h"
#include "runtime/context.h"

namespace sherd {

class Tape final : public Listener {
 public:
  void before_write(const AnyOp& op, Inputs in) override;
  void after(const AnyOp& op, Inputs in, Outputs out) override;
  void host_read(const Tensor& tensor) override;

  /// Of the next node that this rank records, unless its inputs' are larger.
  std::uint64_t next_sequence() const { return next_sequence_; }

 private:
  std::uint64_t next_sequence_ = 1;
};

/// Refuses a view whose memory was changed by a recorded write after the view was taken: its history is that
/// of the values before. `user` opens the message.
void check_fresh_view(std::string_view user, const Tensor& t);

}  // namespace sherd
