// Calls between two ranks that are threads, one JSON line each, medians; beside them what two threads reach
// with plain memcpy on the same bytes, at the same time, in the same run.
//
//   collectives_bench [--ranks 2]
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "sherd.h"

namespace {

using namespace sherd;
using nlohmann::json;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Seconds a call, the median of batches; a batch is long enough that the clock costs nothing.
template <class Call>
double median_seconds(const Call& call, std::int64_t bytes) {
  const int batch =
      static_cast<int>(std::clamp<std::int64_t>((8 << 20) / std::max<std::int64_t>(bytes, 1), 1, 2000));
  std::vector<double> times;
  for (int i = 0; i < 15; ++i) {
    const double start = now();
    for (int k = 0; k < batch; ++k) call();
    times.push_back((now() - start) / batch);
  }
  std::ranges::nth_element(times, times.begin() + 7);
  return times[7];
}

/// What the machine does when every rank copies `bytes` from its neighbour's memory.
double copy_seconds(const Group& group, std::int64_t bytes) {
  const Tensor mine = zeros({bytes}, {u8, Device::cpu()}), out = zeros({bytes}, {u8, Device::cpu()});
  const Tensor address = Tensor::from({reinterpret_cast<std::int64_t>(mine.raw())}, {1});
  const Tensor addresses = zeros({group.size()}, {i64, Device::cpu()});
  group.all_gather(addresses, address);
  const auto neighbour =
      addresses.to_vector<std::int64_t>()[static_cast<std::size_t>((group.rank() + 1) % group.size())];
  group.barrier();
  const double seconds = median_seconds(
      [&] {
        std::memcpy(out.raw(), reinterpret_cast<const void*>(neighbour), static_cast<std::size_t>(bytes));
      },
      bytes);
  group.barrier();
  return seconds;
}

void report(const Group& group, json line) {
  if (group.rank() == 0) std::puts(line.dump().c_str());
}

/// Times `call`, which reads and writes `traffic` bytes on each rank; copying moves two for each byte.
template <class Call>
void against_copy(const Group& group, const char* name, std::int64_t bytes, double traffic,
                  const Call& call) {
  const double copy = copy_seconds(group, bytes / group.size());
  group.barrier();
  const double seconds = median_seconds(call, bytes);
  const double copy_rate = 2.0 * static_cast<double>(bytes / group.size()) / copy;
  report(group, {{"call", name},
                 {"bytes", bytes},
                 {"us", seconds * 1e6},
                 {"of_memcpy", traffic / seconds / copy_rate}});
}

void bench(World& world) {
  const Group& group = world.group();
  const std::int64_t ranks = group.size(), rank = group.rank();
  report(group, {{"call", "barrier"}, {"us", median_seconds([&] { group.barrier(); }, 4096) * 1e6}});
  for (std::int64_t n : {1, 16, 256}) {
    const Tensor x = zeros({n});
    report(group, {{"call", "all_reduce"},
                   {"bytes", n * 4},
                   {"us", median_seconds([&] { group.all_reduce(x); }, 4096) * 1e6}});
  }
  for (std::int64_t bytes = 1024; bytes <= 64 << 20; bytes *= 4) {
    const std::int64_t n = bytes / 4 / ranks;
    const double shard = static_cast<double>(n * 4), others = static_cast<double>(ranks - 1);
    const Tensor full = zeros({n * ranks}), slice = alias(full, {{n}, {1}, rank * n}), out = zeros({n});
    against_copy(group, "all_gather", bytes, 2 * others * shard, [&] { group.all_gather(full, slice); });
    against_copy(group, "reduce_scatter", bytes, (others + 2) * shard,
                 [&] { group.reduce_scatter(out, full); });
    against_copy(group, "all_reduce", bytes, (others + 2 + 2 * others) * shard,
                 [&] { group.all_reduce(full); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  int ranks = 2;
  CLI::App app("Calls between ranks that are threads");
  app.add_option("--ranks", ranks, "how many")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  run_ranks(ranks, bench);
}
