// Bad values that a kernel finds: an index out of range, a weight below zero. The kernel writes a report and
// the host does not wait for it: the rank's next wait (`item`, a copy to the host, `synchronize`) throws.
// Until then floating results of such values are NaN. Safe to include in device code.
#pragma once

#include <cstdint>

namespace sherd::cuda {

/// The kind of bad value; fault_board.cpp has a message for each.
enum class FaultKind : std::int64_t {
  none,
  position,
  cross_entropy_target,
  nll_target,
  multinomial_weight,
  multinomial_zero,
  multinomial_total,
  given_up  ///< no bad value: the ranks of a recorded call do not all come (peer_meeting.h)
};

/// Where a kernel leaves the first bad value that it meets, an index or a weight, at `position`, bounded by
/// `bound`. `call` is host memory that lives as long as the program, and is carried alone.
struct FaultReport {
  FaultKind kind;
  std::int64_t position, bound;
  std::int64_t index;
  double weight;
  const char* call;
};

/// A kernel's way to report. The report lies in host memory that the device sees.
struct FaultSlot {
  unsigned* taken;
  FaultReport* report;

#ifdef __CUDACC__
  __device__ void operator()(FaultKind kind, std::int64_t index, std::int64_t position,
                             std::int64_t bound) const {
    write({kind, position, bound, index, 0, nullptr});
  }
  __device__ void operator()(FaultKind kind, double weight, std::int64_t position, std::int64_t bound) const {
    write({kind, position, bound, 0, weight, nullptr});
  }
  __device__ void operator()(const char* call, std::int64_t index, std::int64_t position,
                             std::int64_t bound) const {
    write({FaultKind::position, position, bound, index, 0, call});
  }
  __device__ void write(const FaultReport& found) const {
    if (atomicCAS(taken, 0u, 1u) != 0) return;
    volatile FaultReport* to = report;
    to->position = found.position;
    to->bound = found.bound;
    to->index = found.index;
    to->weight = found.weight;
    to->call = found.call;
    __threadfence_system();
    to->kind = found.kind;
  }
#endif
};

}  // namespace sherd::cuda
