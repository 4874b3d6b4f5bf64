#include "runtime/cuda/conv_cudnn.h"

#include "runtime/cuda/cudnn_plans.h"

namespace sherd::cuda {
namespace {

using Sizes = CudnnGraph::Sizes;

// Of a plan. No part of the free memory, which would change bits.
constexpr std::int64_t most_workspace_bytes = std::int64_t{1} << 30;

cudnnDataType_t data_type(DType dtype) {
  return dtype == DType::f32    ? CUDNN_DATA_FLOAT
         : dtype == DType::bf16 ? CUDNN_DATA_BFLOAT16
                                : CUDNN_DATA_HALF;
}

CudnnChoice choice_for(const ConvForm& form) {
  return {.most = 512,  // kernels without TF32 come late
          .fallback = true,
          .plain_sums = true,
          .f32 = form.dtype == DType::f32,
          .tf32 = form.tf32,
          .most_workspace_bytes = most_workspace_bytes};
}

Sizes strides_of(const ConvForm& form, const Sizes& s) {
  return form.channels_last ? Sizes{s[1] * s[2] * s[3], 1, s[3] * s[1], s[1]}
                            : Sizes{s[1] * s[2] * s[3], s[2] * s[3], s[3], 1};
}

/// Memory: x, w, y and, where the form has one, the bias.
void draw(const ConvForm& form, CudnnGraph& graph) {
  const cudnnDataType_t type = data_type(form.dtype);
  const auto memory = [&](const Sizes& s) { return graph.memory(type, s, strides_of(form, s)); };
  const int x = memory(form.x), w = memory(form.w), y = memory(form.y);
  const auto makes = static_cast<CudnnGraph::Makes>(form.makes);
  const CudnnGraph::Windows windows{form.stride, form.padding, form.dilation};
  if (!form.bias) return graph.convolution(makes, windows, x, w, y);
  const int sums = graph.between(CUDNN_DATA_FLOAT, form.y, strides_of(form, form.y));
  graph.convolution(makes, windows, x, w, sums);
  graph.pointwise(CUDNN_POINTWISE_ADD, {sums, memory({1, form.y[1], 1, 1})}, y);
}

}  // namespace

struct CudnnConv::Plans {
  std::unique_ptr<CudnnPlans<ConvForm>> all;  // none where cuDNN is not installed

  const CudnnPlan* find(const ConvForm& form) const {
    return all ? all->find(form, choice_for(form), draw) : nullptr;
  }
};

CudnnConv::CudnnConv(Device device) : plans_(std::make_unique<Plans>()) {
  plans_->all = CudnnPlans<ConvForm>::make(device);
}
CudnnConv::~CudnnConv() = default;

bool CudnnConv::is_there() const { return plans_->all != nullptr; }
bool CudnnConv::has(const ConvForm& form) { return plans_->find(form) != nullptr; }

bool CudnnConv::run(const ConvForm& form, const ConvData& data, cudaStream_t stream) {
  const CudnnPlan* const plan = plans_->find(form);
  if (plan == nullptr) return false;
  void* const memory[] = {data.x, data.w, data.y, data.bias};
  return plans_->all->run(*plan, std::span(memory, form.bias ? 4 : 3), stream);
}

}  // namespace sherd::cuda
