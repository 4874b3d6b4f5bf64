// Calls among ranks inside of graphs: kernels that wait for the peers' kernels. Safe to include in device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "runtime/cuda/faults.h"
#include "runtime/forward.h"
#include "runtime/reduce_op.h"

namespace sherd::cuda {

/// What a rank has in its meeting's memory before the bytes that its peers take.
struct MeetingHead {
  static constexpr int most_ranks = 16;
  unsigned arrived[most_ranks];  ///< by rank: the calls for which it has left its bytes; each writes its own
  unsigned left;                 ///< blocks of the call under way that have left their bytes
  unsigned long long calls;      ///< of this rank so far
};
/// Where the bytes begin: two halves, used in turns by the runs of a graph, so that nobody need wait until the
/// others have taken what it left.
inline constexpr std::size_t meeting_head_bytes = 256;
static_assert(sizeof(MeetingHead) <= meeting_head_bytes);

struct MeetingTable {
  std::byte* place[MeetingHead::most_ranks];
  const unsigned* given_up;  ///< of this rank, in the host's memory: not 0 when its kernels shall not wait
  FaultSlot faults;
  int rank, size;
  unsigned calls_a_run;
  std::uint32_t half_bytes;
};

/// Offsets are those of a half.
struct MeetingPieces {
  static constexpr int most = 64;
  int leaves = 0, takes = 0, combinations = 0;
  struct {
    const std::byte* from;
    std::uint32_t at, bytes;
  } leave[most];
  union {
    struct {
      std::byte* to;
      std::uint32_t at, bytes;
      int rank;
    } take[most];
    struct {
      std::byte* out;
      std::uint32_t at, count;
    } combination[most];
  };
};

void launch_meeting(const MeetingTable& table, const MeetingPieces& pieces, DType dtype, ReduceOp reduction,
                    cudaStream_t stream);

}  // namespace sherd::cuda
