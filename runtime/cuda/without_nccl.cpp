// Where Sherd was built without NCCL's header.
#include "runtime/cuda/nccl.h"
#include "runtime/error.h"

namespace sherd::cuda {

NetworkOffer nccl_offer(Device, bool) { return {}; }
std::unique_ptr<DeviceNetwork> nccl_connect(DeviceState&, Device, NetworkOffer, const NetworkCard&, int,
                                            int) {
  fail<NotImplementedError>("nccl: Sherd was built without it");
}

}  // namespace sherd::cuda
