#include "runtime/cuda/peer_meeting.h"

#include <cstring>

#include "runtime/combine_rule.h"
#include "runtime/cuda/block.cuh"

namespace sherd::cuda {
namespace {

constexpr int meeting_threads = 256;
constexpr unsigned most_meeting_blocks = 48;

__host__ __device__ std::int64_t units_of(std::uint32_t bytes) {
  const std::int64_t units = (bytes + unit_bytes - 1) / unit_bytes;
  return units > 0 ? units : 1;  // a rank that brings nothing meets the others too
}

struct Unit {
  unsigned half[2];
};
/// A half beside the number of the run, in one word that is read and written whole.
__device__ unsigned long long sent_half(unsigned half, unsigned run) {
  return static_cast<unsigned long long>(run) << 32 | half;
}

/// `bytes` of a unit, which may lie anywhere.
__device__ Unit load_unit(const std::byte* at, int bytes) {
  Unit unit{};
  if (bytes == static_cast<int>(unit_bytes) && reinterpret_cast<std::uintptr_t>(at) % unit_bytes == 0) {
    const uint2 both = *reinterpret_cast<const uint2*>(at);
    return {{both.x, both.y}};
  }
  auto* to = reinterpret_cast<unsigned char*>(&unit);
  for (int i = 0; i < bytes; ++i) to[i] = static_cast<unsigned char>(at[i]);
  return unit;
}
__device__ void store_unit(std::byte* at, Unit unit, int bytes) {
  if (bytes == static_cast<int>(unit_bytes) && reinterpret_cast<std::uintptr_t>(at) % unit_bytes == 0) {
    *reinterpret_cast<uint2*>(at) = {unit.half[0], unit.half[1]};
    return;
  }
  const auto* from = reinterpret_cast<const unsigned char*>(&unit);
  for (int i = 0; i < bytes; ++i) at[i] = static_cast<std::byte>(from[i]);
}

/// One rank's side of one call in the run under way.
class Meeting {
 public:
  __device__ Meeting(const MeetingTable& m)
      : m_(m),
        run_(*reinterpret_cast<const unsigned*>(m.place[m.rank])),
        begin_(meeting_head_bytes + run_ % 2 * m.half_bytes) {}

  /// Unit `u` of `part` to every other rank.
  template <class Part>
  __device__ void send(const Part& part, std::int64_t u) const {
    const int bytes = bytes_of(part, u);
    for (int to = 0; to < m_.size; ++to) {
      if (to == m_.rank) continue;
      const Unit unit = part.in == nullptr ? Unit{} : own(part, to, u, bytes);
      asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(arrival(to, part, m_.rank, u)),
                   "l"(sent_half(unit.half[0], run_)), "l"(sent_half(unit.half[1], run_))
                   : "memory");
    }
  }
  /// What rank `from` has sent, or this rank's own.
  template <class Part>
  __device__ Unit receive(const Part& part, std::int64_t u, int from) {
    if (from == m_.rank) return part.in == nullptr ? Unit{} : own(part, from, u, bytes_of(part, u));
    unsigned long long first, second;
    for (unsigned looks = 1;; ++looks) {
      asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                   : "=l"(first), "=l"(second)
                   : "l"(arrival(m_.rank, part, from, u))
                   : "memory");
      if (first >> 32 == run_ && second >> 32 == run_)
        return {{static_cast<unsigned>(first), static_cast<unsigned>(second)}};
      if (looks % 1024 == 0 && *static_cast<const volatile unsigned*>(m_.given_up) != 0) break;
    }
    given_up_ = true;
    return {};
  }
  template <class Part>
  __device__ static int bytes_of(const Part& part, std::int64_t u) {
    const std::int64_t left = part.bytes - u * static_cast<std::int64_t>(unit_bytes);
    return static_cast<int>(left < static_cast<std::int64_t>(unit_bytes) ? left : unit_bytes);
  }
  /// Nothing that was received is to be used from then on.
  __device__ bool given_up() const { return given_up_; }
  __device__ void report() const {
    if (given_up_) m_.faults(FaultKind::given_up, std::int64_t{0}, 0, 0);
  }

 private:
  template <class Part>
  __device__ static Unit own(const Part& part, int to, std::int64_t u, int bytes) {
    return load_unit(
        part.in + to * static_cast<std::int64_t>(part.in_step) + u * static_cast<std::int64_t>(unit_bytes),
        bytes);
  }
  template <class Part>
  __device__ std::byte* arrival(int at, const Part& part, int from, std::int64_t u) const {
    return m_.place[at] + begin_ + part.at +
           (from * units_of(part.bytes) + u) * static_cast<std::int64_t>(sent_unit_bytes);
  }
  const MeetingTable& m_;
  const unsigned run_;
  const std::size_t begin_;
  bool given_up_ = false;
};

/// This thread's units of all parts, by `body(part, unit)`: the same in each call, so that a thread writes
/// only where it has read.
template <class Body>
__device__ void each_unit(const MeetingParts& p, const Body& body) {
  std::int64_t unit = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x, first = 0;
  for (int i = 0; i < p.count; ++i) {
    const std::int64_t end = first + units_of(p.part[i].bytes);
    for (; unit < end; unit += std::int64_t{gridDim.x} * blockDim.x) body(p.part[i], unit - first);
    first = end;
  }
}

__global__ void begin_run(unsigned* run) { ++*run; }

__global__ void __launch_bounds__(meeting_threads)
    meet_to_copy(const __grid_constant__ MeetingTable m, const __grid_constant__ MeetingParts p) {
  Meeting meeting(m);
  each_unit(p, [&](const auto& part, std::int64_t u) { meeting.send(part, u); });
  each_unit(p, [&](const auto& part, std::int64_t u) {
    for (int from = 0; from < m.size; ++from) {
      const Unit unit = meeting.receive(part, u, from);
      if (meeting.given_up() || part.out == nullptr || (m.root >= 0 && from != m.root)) continue;
      store_unit(part.out + from * static_cast<std::int64_t>(part.out_step) +
                     u * static_cast<std::int64_t>(unit_bytes),
                 unit, meeting.bytes_of(part, u));
    }
  });
  meeting.report();
}

template <class T, class R>
__global__ void __launch_bounds__(meeting_threads)
    meet_to_sum(const __grid_constant__ MeetingTable m, const __grid_constant__ MeetingParts p, R rule) {
  constexpr int V = static_cast<int>(unit_bytes / sizeof(T));
  using Pack = Packed<V, T>;
  static_assert(sizeof(Pack) == sizeof(Unit));
  Meeting meeting(m);
  each_unit(p, [&](const auto& part, std::int64_t u) { meeting.send(part, u); });
  each_unit(p, [&](const auto& part, std::int64_t u) {
    Packed<V, compute_t<T>> sum;
    for (int from = 0; from < m.size; ++from) {
      const Unit unit = meeting.receive(part, u, from);
      Pack x;
      std::memcpy(&x, &unit, sizeof x);
#pragma unroll
      for (int j = 0; j < V; ++j)
        sum.at[j] = from == 0 ? rule.first(widen(x.at[j])) : rule.next(sum.at[j], widen(x.at[j]));
    }
    Pack out;
#pragma unroll
    for (int j = 0; j < V; ++j) out.at[j] = narrow<T>(rule.last(sum.at[j], m.size));
    Unit unit;
    std::memcpy(&unit, &out, sizeof unit);
    if (!meeting.given_up())
      store_unit(part.out + u * static_cast<std::int64_t>(unit_bytes), unit, meeting.bytes_of(part, u));
  });
  meeting.report();
}

unsigned blocks_for(const MeetingParts& parts) {
  std::int64_t units = 0;
  for (int i = 0; i < parts.count; ++i) units += units_of(parts.part[i].bytes);
  const std::int64_t blocks = (units + meeting_threads - 1) / meeting_threads;
  return static_cast<unsigned>(blocks < most_meeting_blocks ? blocks : most_meeting_blocks);
}

}  // namespace

void launch_run(const MeetingTable& table, cudaStream_t stream) {
  begin_run<<<1, 1, 0, stream>>>(reinterpret_cast<unsigned*>(table.place[table.rank]));
}

void launch_meeting_copies(const MeetingTable& table, const MeetingParts& parts, cudaStream_t stream) {
  meet_to_copy<<<blocks_for(parts), meeting_threads, 0, stream>>>(table, parts);
}

void launch_meeting_sums(const MeetingTable& table, const MeetingParts& parts, DType dtype,
                         ReduceOp reduction, cudaStream_t stream) {
  with_combine_rule(dtype, reduction, table.size, [&]<class T, class R>(R rule) {
    meet_to_sum<T><<<blocks_for(parts), meeting_threads, 0, stream>>>(table, parts, rule);
  });
}

}  // namespace sherd::cuda
