#include "runtime/cuda/elementwise.cuh"
#include "runtime/ops/elementwise_list.h"

namespace sherd::cuda {
namespace {

/// Values are chosen, not computed with, so their size says it all.
void launch_where(const Operands& p) {
  switch (size_of(p.dtype)) {
    case 1:
      return launch<ops::Where, std::uint8_t, bool, std::uint8_t, std::uint8_t>({}, p);
    case 2:
      return launch<ops::Where, std::uint16_t, bool, std::uint16_t, std::uint16_t>({}, p);
    case 4:
      return launch<ops::Where, std::uint32_t, bool, std::uint32_t, std::uint32_t>({}, p);
    default:
      return launch<ops::Where, std::uint64_t, bool, std::uint64_t, std::uint64_t>({}, p);
  }
}

void where_kernel(const void*, Inputs in, Outputs out) {
  with_operands(in, out, [](const Operands& p) {
    if (p.numel == 0) return;
    launch_where(p);
    check_launch(ops::Where::name);
  });
}

}  // namespace

void add_binary() {
  ops::ArithmeticOps::for_each([&]<class O>() { add_elementwise<O>(); });
  kernel_row<ops::Where>().set(DeviceType::cuda, where_kernel);
}

}  // namespace sherd::cuda
