// Loops of the unary ops.
#include "runtime/cpu/elementwise_loop.h"
#include "runtime/ops/elementwise_list.h"

namespace sherd::cpu {

void add_unary() {
  ops::UnaryOps::for_each([]<class O>() { add_elementwise<O>(); });
}

}  // namespace sherd::cpu
