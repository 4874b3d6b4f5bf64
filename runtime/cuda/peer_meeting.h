// Calls among ranks inside of graphs: kernels that wait for what the peers' kernels send. Safe to include in
// device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "runtime/cuda/faults.h"
#include "runtime/forward.h"
#include "runtime/reduce_op.h"

namespace sherd::cuda {

/// A rank's memory in a meeting begins with the number of the run; what arrives follows in two halves, which
/// runs use in turns: when a rank sends for the second time to one half, all have taken what was there.
inline constexpr std::size_t meeting_head_bytes = 256;

/// What travels: 8 bytes in halves, each beside the number of the run. A receiver reads until both are there,
/// so no order of two stores matters, and nothing but the bytes is sent.
inline constexpr std::size_t unit_bytes = 8, sent_unit_bytes = 16;

struct MeetingTable {
  static constexpr int most_ranks = 16;
  std::byte* place[most_ranks];  ///< by rank
  const unsigned* given_up;  ///< of this rank, in the host's memory: not 0 when its kernels shall not wait
  FaultSlot faults;
  int rank, size;
  int root;  ///< whose bytes are taken; -1: those of all
  std::uint32_t half_bytes;
};

/// `MeetingPart`s of one call.
struct MeetingParts {
  static constexpr int most = 64;
  int count = 0;
  struct {
    const std::byte* in;
    std::byte* out;
    std::uint32_t bytes, in_step, out_step, at;
  } part[most];
};

/// Begins a run; recorded before the first call of the step.
void launch_run(const MeetingTable& table, cudaStream_t stream);
/// A call that places what arrives.
void launch_meeting_copies(const MeetingTable& table, const MeetingParts& parts, cudaStream_t stream);
/// A call that combines what arrives.
void launch_meeting_sums(const MeetingTable& table, const MeetingParts& parts, DType dtype,
                         ReduceOp reduction, cudaStream_t stream);

}  // namespace sherd::cuda
