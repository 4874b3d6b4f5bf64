// The listener that records ops whose inputs want gradients.
#pragma once

#include "autograd/node.h"
#include "runtime/context.h"

namespace sherd {

class Tape final : public Listener {
 public:
  void before_write(const AnyOp& op, Inputs in) override;
  void after(const AnyOp& op, Inputs in, Outputs out) override;
  void host_read(const Tensor& tensor) override;

 private:
  std::uint64_t next_sequence_ = 1;
};

}  // namespace sherd
