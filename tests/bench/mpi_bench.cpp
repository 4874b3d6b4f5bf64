// Calls between processes beside OpenMPI's own on the same bytes, in turns, in the same run: one JSON line
// each, medians. Run it as the ranks of a launcher:
//
//   sherd launch -n 2 mpi_bench
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "sherd.h"

namespace {

using namespace sherd;
using nlohmann::json;

template <class Call>
double batch_seconds(const Call& call, int count) {
  const double start = MPI_Wtime();
  for (int i = 0; i < count; ++i) call();
  return (MPI_Wtime() - start) / count;
}

double median(std::vector<double> times) {
  std::ranges::nth_element(times, times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2));
  return times[times.size() / 2];
}

/// Microseconds a call, ours and theirs. They take turns, so that both meet the same machine.
template <class Ours, class Theirs>
void compare(const Group& group, const char* name, std::int64_t bytes, const Ours& ours,
             const Theirs& theirs) {
  const int count =
      static_cast<int>(std::clamp<std::int64_t>((16 << 20) / std::max<std::int64_t>(bytes, 1), 2, 500));
  std::vector<double> our_times, their_times;
  for (int i = 0; i < 21; ++i) {
    group.barrier();
    our_times.push_back(batch_seconds(ours, count));
    MPI_Barrier(MPI_COMM_WORLD);
    their_times.push_back(batch_seconds(theirs, count));
  }
  const double our_time = median(our_times), their_time = median(their_times);
  if (group.rank() != 0) return;
  const json line = {{"call", name},
                     {"bytes", bytes},
                     {"us", our_time * 1e6},
                     {"mpi_us", their_time * 1e6},
                     {"speed_of_mpi", their_time / our_time}};
  std::puts(line.dump().c_str());
}

void bench(World& world) {
  const Group& group = world.group();
  const int ranks = group.size();
  compare(group, "barrier", 0, [&] { group.barrier(); }, [] { MPI_Barrier(MPI_COMM_WORLD); });
  for (std::int64_t bytes = 1024; bytes <= 16 << 20; bytes *= 4) {
    const std::int64_t n = bytes / 4 / ranks;
    const int count = static_cast<int>(n);
    const Tensor whole = zeros({n * ranks}), part = zeros({n}), sum = zeros({n * ranks});
    float* const w = whole.mutable_data<float>();
    float* const p = part.mutable_data<float>();
    float* const s = sum.mutable_data<float>();
    compare(
        group, "all_gather", bytes, [&] { group.all_gather(whole, part); },
        [&] { MPI_Allgather(p, count, MPI_FLOAT, w, count, MPI_FLOAT, MPI_COMM_WORLD); });
    compare(
        group, "reduce_scatter", bytes, [&] { group.reduce_scatter(part, whole); },
        [&] { MPI_Reduce_scatter_block(w, p, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); });
    compare(
        group, "all_reduce", bytes, [&] { group.call({CollectiveKind::all_reduce, {whole}, {sum}}); },
        [&] { MPI_Allreduce(w, s, count * ranks, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); });
  }
}

}  // namespace

int main() { sherd::run_ranks(0, bench); }
