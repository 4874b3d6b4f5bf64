// Loops of the binary ops, of their forms with a number, and of `where`.
#include "runtime/cpu/elementwise_loop.h"
#include "runtime/ops/elementwise_list.h"

namespace sherd::cpu {

void add_binary() {
  ops::ArithmeticOps::for_each([]<class O>() { add_elementwise<O>(); });
  ops::ComparisonOps::for_each([]<class O>() { add_elementwise<O>(); });
  ops::BoundRight::for_each([]<class O>() { add_elementwise<WithScalar<O>>(); });
  ops::BoundLeft::for_each([]<class O>() { add_elementwise<ScalarWith<O>>(); });
  add_elementwise<ops::Where>();
}

}  // namespace sherd::cpu
