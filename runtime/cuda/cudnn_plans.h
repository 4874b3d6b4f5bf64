// The plans of one rank on one GPU for graphs of one kind.
#pragma once

#include <map>
#include <memory>

#include "runtime/backend.h"
#include "runtime/cuda/beside_recording.h"
#include "runtime/cuda/cudnn_graph.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/tensor.h"

namespace sherd::cuda {

/// Plans by the forms of calls. One is made when its form is first met, which takes tens of milliseconds.
template <class Form>
class CudnnPlans {
 public:
  /// None where cuDNN is not installed.
  static std::unique_ptr<CudnnPlans> make(Device device) {
    const BesideRecording scope;
    cudnnHandle_t handle = nullptr;
    if (!cudnn() || cudnn()->create(&handle) != CUDNN_STATUS_SUCCESS) return nullptr;
    return std::make_unique<CudnnPlans>(device, handle);
  }
  CudnnPlans(Device device, cudnnHandle_t handle) : device_(device), handle_(handle) {}
  ~CudnnPlans() {
    of_.clear();
    cudnn()->destroy(handle_);
  }
  CudnnPlans(const CudnnPlans&) = delete;
  CudnnPlans& operator=(const CudnnPlans&) = delete;

  /// The plan for the graph that `draw(form, graph)` draws; null where there is none. Valid until the next
  /// call.
  template <class Draw>
  const CudnnPlan* find(const Form& form, const CudnnChoice& choice, const Draw& draw) {
    const auto found = of_.find(form);
    if (found != of_.end()) return found->second ? &*found->second : nullptr;
    if (of_.size() >= most && !state_of(device_).recording()) {  // which must not wait
      backend(DeviceType::cuda).synchronize(device_);            // some may be queued
      of_.clear();
    }
    const BesideRecording scope;
    CudnnGraph graph;
    draw(form, graph);
    const std::optional<CudnnPlan>& made = of_.emplace(form, graph.plan(handle_, choice)).first->second;
    return made ? &*made : nullptr;
  }

  /// Queues a plan; false where the library refuses.
  bool run(const CudnnPlan& plan, std::span<void* const> memory, cudaStream_t stream) {
    if (stream != stream_ && cudnn()->set_stream(handle_, stream) != CUDNN_STATUS_SUCCESS) return false;
    stream_ = stream;
    const Tensor workspace = empty({plan.workspace_bytes()}, {DType::u8, device_});
    return plan.run(handle_, memory, workspace.raw());
  }

 private:
  static constexpr std::size_t most = 1024;  // then all are dropped, for programs with ever new shapes

  Device device_;
  cudnnHandle_t handle_;
  cudaStream_t stream_ = nullptr;
  std::map<Form, std::optional<CudnnPlan>> of_;
};

}  // namespace sherd::cuda
