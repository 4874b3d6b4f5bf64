// Loops of the optimizers' rules.
#include "runtime/ops/optimizer_steps.h"

#include "runtime/cpu/list_step_loop.h"

namespace sherd::cpu {

void add_optimizer_steps() {
  add_list_step<ops::AdamStep>();
  add_list_step<ops::SgdStep>();
  add_list_step<ops::RmspropStep>();
  add_list_step<ops::LionStep>();
  add_list_step<ops::AdagradStep>();
}

}  // namespace sherd::cpu
