// Where Sherd was built without cuDNN's headers.
#include "runtime/cuda/conv_cudnn.h"

namespace sherd::cuda {

struct CudnnConv::Plans {};

CudnnConv::CudnnConv(Device) {}
CudnnConv::~CudnnConv() = default;
bool CudnnConv::is_there() const { return false; }
bool CudnnConv::has(const ConvForm&) { return false; }
bool CudnnConv::run(const ConvForm&, const ConvData&, cudaStream_t) { return false; }

}  // namespace sherd::cuda
