// As an application compiles the kernels of its losses.
#include "tests/cuda/own_loss.h"

#include "runtime/cuda/loss_total.cuh"
#include "tests/runtime/own_losses.h"

namespace sherd::test {

void add_own_losses_on_gpu() {
  cuda::add_loss<Rooted>();
  cuda::add_loss<Grown>();
  cuda::add_loss<Tilted>();
}

}  // namespace sherd::test
