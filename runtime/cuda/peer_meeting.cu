#include "runtime/cuda/peer_meeting.h"

#include "runtime/cuda/peer_moves.cuh"

namespace sherd::cuda {
namespace {

__device__ MeetingHead& head_of(const MeetingTable& m, int rank) {
  return *reinterpret_cast<MeetingHead*>(m.place[rank]);
}

__device__ void store_for_peer(unsigned* at, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ unsigned load_of_peer(const unsigned* at) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

/// All blocks have left this rank's bytes of call `call` when the last of them tells the peers.
__device__ void arrive(const MeetingTable& m, unsigned long long call) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  MeetingHead& own = head_of(m, m.rank);
  __threadfence_system();
  if (atomicAdd(&own.left, 1u) + 1 != gridDim.x) return;
  own.left = 0;
  own.calls = call;
  __threadfence_system();
  for (int rank = 0; rank < m.size; ++rank) store_for_peer(&head_of(m, rank).arrived[m.rank], static_cast<unsigned>(call));
}

/// False where the meeting was given up.
__device__ bool all_arrive(const MeetingTable& m, unsigned long long call) {
  bool given_up = false;
  if (threadIdx.x < static_cast<unsigned>(m.size)) {
    const unsigned* arrived = &head_of(m, m.rank).arrived[threadIdx.x];
    for (unsigned looks = 1; static_cast<int>(load_of_peer(arrived) - static_cast<unsigned>(call)) < 0; ++looks)
      if (looks % 1024 == 0 && load_of_peer(m.given_up) != 0) {
        given_up = true;
        break;
      }
  }
  return __syncthreads_or(given_up) == 0;
}

/// `Take`: takes what all ranks have left, whose halves begin at `half(rank)`.
template <class Take>
__device__ void meet(const MeetingTable& m, const MeetingPieces& p, const Take& take) {
  const unsigned long long before = head_of(m, m.rank).calls;
  const std::size_t begin = meeting_head_bytes + (before / m.calls_a_run) % 2 * m.half_bytes;
  const auto half = [&](int rank) { return m.place[rank] + begin; };
  each_chunk(
      p.leaves, [&](int piece) { return std::int64_t{p.leave[piece].bytes}; },
      [&](int piece, std::int64_t chunk) {
        const auto& [from, at, bytes] = p.leave[piece];
        copy_chunk(half(m.rank) + at, from, bytes, chunk);
      });
  arrive(m, before + 1);
  if (all_arrive(m, before + 1))
    take(half);
  else if (threadIdx.x == 0)
    m.faults(FaultKind::given_up, std::int64_t{0}, 0, 0);
}

__global__ void __launch_bounds__(move_threads)
    meet_to_copy(const __grid_constant__ MeetingTable m, const __grid_constant__ MeetingPieces p) {
  meet(m, p, [&](const auto& half) {
    each_chunk(
        p.takes, [&](int piece) { return std::int64_t{p.take[piece].bytes}; },
        [&](int piece, std::int64_t chunk) {
          const auto& [to, at, bytes, rank] = p.take[piece];
          copy_chunk(to, half(rank) + at, bytes, chunk);
        });
  });
}

template <class T, class R>
__global__ void __launch_bounds__(move_threads)
    meet_to_combine(const __grid_constant__ MeetingTable m, const __grid_constant__ MeetingPieces p, R rule) {
  meet(m, p, [&](const auto& half) {
    each_chunk(
        p.combinations,
        [&](int piece) { return p.combination[piece].count * static_cast<std::int64_t>(sizeof(T)); },
        [&](int piece, std::int64_t chunk) {
          const auto& [out, at, count] = p.combination[piece];
          combine_chunk<T>(
              out, m.size, [&](int rank) { return half(rank) + at; }, count, chunk, rule);
        });
  });
}

}  // namespace

void launch_meeting(const MeetingTable& table, const MeetingPieces& pieces, DType dtype, ReduceOp reduction,
                    cudaStream_t stream) {
  std::int64_t left = 0, taken = 0;
  for (int i = 0; i < pieces.leaves; ++i) left += pieces.leave[i].bytes;
  for (int i = 0; i < pieces.takes; ++i) taken += pieces.take[i].bytes;
  for (int i = 0; i < pieces.combinations; ++i) taken += pieces.combination[i].count * size_of(dtype);
  // One piece more, so that a rank without any meets the others.
  const unsigned blocks = move_blocks(left < taken ? taken : left,
                                      1 + (pieces.leaves < pieces.takes ? pieces.takes : pieces.leaves));
  if (pieces.combinations == 0) {
    meet_to_copy<<<blocks, move_threads, 0, stream>>>(table, pieces);
    return;
  }
  with_rule(dtype, reduction, table.size, [&]<class T, class R>(R rule) {
    meet_to_combine<T><<<blocks, move_threads, 0, stream>>>(table, pieces, rule);
  });
}

}  // namespace sherd::cuda
