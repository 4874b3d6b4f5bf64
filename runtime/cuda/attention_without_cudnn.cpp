// Where Sherd was built without cuDNN's headers.
#include "runtime/cuda/attention_cudnn.h"

namespace sherd::cuda {

struct CudnnAttention::Plans {};

CudnnAttention::CudnnAttention(Device) {}
CudnnAttention::~CudnnAttention() = default;
bool CudnnAttention::wants(const AttentionCall&) const { return false; }
bool CudnnAttention::run(const AttentionCall&) { return false; }
bool CudnnAttention::run(const AttentionGradCall&) { return false; }

}  // namespace sherd::cuda
