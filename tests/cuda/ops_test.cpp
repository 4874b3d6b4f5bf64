// Every op of the table of cases on a GPU against the CPU, by its kernel or by its form in other ops.
#include "tests/cuda/compare.h"
#include "tests/runtime/op_cases.h"

using namespace sherd;
using namespace sherd::test;

TEST_CASE("cuda: every op of the list agrees with the CPU, values and gradients to second order") {
  if (no_gpu()) return;
  check_device(gpu);
}
