#include "runtime/cuda/fault_board.h"

#include <utility>

#include "runtime/cuda/check.h"

namespace sherd::cuda {
namespace {

[[noreturn]] void refuse(const FaultReport& r) {
  switch (r.kind) {
    case FaultKind::position:
      fail<ValueError>("{}: index {} at position {} is outside [0, {}); the device found it earlier", r.call,
                       r.index, r.position, r.bound);
    case FaultKind::cross_entropy_target:
      fail<ValueError>(
          "cross_entropy: target {} of row {} is outside [0, {}) and is not ignore_index; the device found "
          "it earlier",
          r.index, r.position, r.bound);
    case FaultKind::nll_target:
      fail<ValueError>(
          "nll_loss: target {} of row {} is outside [0, {}) and is not ignore_index; the device found it "
          "earlier",
          r.index, r.position, r.bound);
    case FaultKind::multinomial_weight:
      fail<ValueError>(
          "multinomial: weight {} of row {} is not a finite number >= 0; the device found it earlier",
          r.weight, r.position);
    case FaultKind::multinomial_total:
      fail<ValueError>(
          "multinomial: the weights of row {} add up to more than f64 holds; scale them; the device found it "
          "earlier",
          r.position);
    case FaultKind::given_up:
      fail<DeviceError>(
          "collectives: a captured step gave up a call among ranks, because the group has failed; the "
          "group's next call says why");
    default:
      fail<ValueError>("multinomial: the weights of row {} are all zero; the device found it earlier",
                       r.position);
  }
}

}  // namespace

FaultBoard::FaultBoard() {
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&slot_.taken), sizeof *slot_.taken), "cuda faults");
  check_cuda(cudaMemset(slot_.taken, 0, sizeof *slot_.taken), "cuda faults");
  check_cuda(
      cudaHostAlloc(reinterpret_cast<void**>(&slot_.report), sizeof *slot_.report, cudaHostAllocMapped),
      "cuda faults");
  *slot_.report = {};
  check_cuda(cudaStreamSynchronize(nullptr), "cuda faults");  // for which our streams do not wait
}

FaultBoard::~FaultBoard() {
  cudaFree(slot_.taken);
  cudaFreeHost(slot_.report);
}

void FaultBoard::raise(cudaStream_t stream) {
  volatile const FaultReport* seen = slot_.report;
  if (seen->kind == FaultKind::none) [[likely]]
    return;
  const FaultReport report = std::exchange(*slot_.report, {});
  check_cuda(cudaMemsetAsync(slot_.taken, 0, sizeof *slot_.taken, stream), "cuda faults");
  refuse(report);
}

}  // namespace sherd::cuda
