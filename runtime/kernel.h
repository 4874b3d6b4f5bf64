// Which code computes an op on a device: one table, with a row for each type of op and a place in it for each
// type of device. Back ends fill it with `add_kernel`, the library's and an application's; `apply` reads it.
#pragma once

#include <array>
#include <atomic>
#include <span>
#include <typeindex>

#include "runtime/device.h"

namespace sherd {

class Tensor;
using Inputs = std::span<const Tensor>;
using Outputs = std::span<Tensor>;

/// Computes the outputs of an op. `op` points to a value of the type that the row is for. All tensors are on
/// one device of the type that the kernel was added for (unless the op crosses devices); outputs are
/// allocated, and for an op that writes inputs they are those inputs. `apply` has checked shapes and dtypes.
using Kernel = void (*)(const void* op, Inputs in, Outputs out);

/// The kernels of one type of op, by type of device. Reading takes no lock; `set` may be called at any time.
class KernelRow {
 public:
  /// The kernel on devices of this type, or null.
  Kernel on(DeviceType device) const {
    return places_[static_cast<std::size_t>(device)].load(std::memory_order_acquire);
  }
  void set(DeviceType device, Kernel kernel) {
    places_[static_cast<std::size_t>(device)].store(kernel, std::memory_order_release);
  }

 private:
  std::array<std::atomic<Kernel>, device_type_limit> places_{};
};

/// The row of a type of op, made at the first request. The reference stays valid until the process ends.
SHERD_API KernelRow& kernel_row(std::type_index op);

template <class O>
KernelRow& kernel_row() {
  static KernelRow& row = kernel_row(std::type_index(typeid(O)));
  return row;
}

namespace detail {
template <class F>
struct OpOfKernel;
template <class O>
struct OpOfKernel<void (*)(const O&, Inputs, Outputs)> {
  using type = O;
};
}  // namespace detail

/// Makes `F`, a function (const O& op, Inputs in, Outputs out), the kernel of ops of type O on `device`:
/// `add_kernel<softmax>(DeviceType::cpu);`. A second one replaces the first.
template <auto F>
void add_kernel(DeviceType device) {
  using O = typename detail::OpOfKernel<decltype(F)>::type;
  kernel_row<O>().set(device,
                      [](const void* op, Inputs in, Outputs out) { F(*static_cast<const O*>(op), in, out); });
}

}  // namespace sherd
