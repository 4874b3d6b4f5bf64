// The small model whose step is host overhead and little else: three of these in a row.
#pragma once

#include "nn/layers.h"
#include "runtime/ops.h"

namespace sherd::bench {

struct Mlp final : nn::Layer<Mlp> {
  nn::Linear up{16, 64}, down{64, 16};
  Tensor forward(const Tensor& x) const { return relu(down(relu(up(x)))); }
  void visit(auto&& on) {
    on("up", up);
    on("down", down);
  }
};

}  // namespace sherd::bench
