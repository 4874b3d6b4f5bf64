#include "runtime/cuda/list_step.cuh"
#include "runtime/ops/optimizer_steps.h"

namespace sherd::cuda {

void add_optimizer() {
  add_list_step<ops::AdamStep>();
  add_list_step<ops::SgdStep>();
  add_list_step<ops::RmspropStep>();
  add_list_step<ops::LionStep>();
  add_list_step<ops::AdagradStep>();
}

}  // namespace sherd::cuda
