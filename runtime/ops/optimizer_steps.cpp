#include "runtime/ops/optimizer_steps.h"

#include "runtime/list_step.h"

namespace sherd {

template struct ListStep<ops::AdamStep>;
template struct ListStep<ops::SgdStep>;
template struct ListStep<ops::RmspropStep>;
template struct ListStep<ops::LionStep>;
template struct ListStep<ops::AdagradStep>;

}  // namespace sherd
