// The table of parity on ranks that are processes: every way gives the bits that it gives on threads.
//   mpirun -n 3 shard_parity_processes
#include <algorithm>
#include <bit>
#include <iostream>

#include "tests/ranks.h"
#include "tests/shard/parity_table.h"
#include "tests/shard/scaler_runs.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// FNV-1a over what a record holds.
class Digest {
 public:
  explicit Digest(const Record& record) {
    for (const float loss : record.losses) add(std::bit_cast<std::uint32_t>(loss));
    for (const double norm : record.norms) add(std::bit_cast<std::uint64_t>(norm));
    for (const auto& [name, values] : record.values) {
      for (const char c : name) add(static_cast<unsigned char>(c));
      for (const float v : values) add(std::bit_cast<std::uint32_t>(v));
    }
  }
  std::int64_t value() const { return std::bit_cast<std::int64_t>(hash_); }

 private:
  void add(std::uint64_t part) {
    for (int byte = 0; byte < 8; ++byte) hash_ = (hash_ ^ (part >> 8 * byte & 255)) * 1099511628211u;
  }
  std::uint64_t hash_ = 14695981039346656037u;
};

std::vector<std::string_view> ways_of(int world) {
  std::vector<std::string_view> names;
  const auto add = [&](std::string_view name) {
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  };
  for (const ParityRow& row : parity_table) {
    if (std::ranges::find(row.worlds, world) == row.worlds.end()) continue;
    add(row.reference);
    for (const std::string_view way : row.ways) add(way);
  }
  return names;
}

std::vector<std::int64_t> digests(World& world) {
  std::vector<std::int64_t> all;
  for (const std::string_view way : ways_of(world.size()))
    all.push_back(Digest(record_of(way, world)).value());
  return all;
}

/// The first process runs as many threads and compares.
void same_bits_as_threads(World& processes) {
  const std::vector<std::int64_t> own = digests(processes);
  const std::size_t count = own.size();
  const Tensor all = empty({processes.size() * std::ssize(own)}, {i64});
  processes.group().all_gather(all, Tensor::from(own, {std::ssize(own)}));
  if (processes.rank() == 0) {
    const std::vector<std::int64_t> theirs = all.to_vector<std::int64_t>();
    run_ranks(processes.size(), [&](World& threads) {
      const std::vector<std::int64_t> ours = digests(threads);
      for (std::size_t way = 0; way < count; ++way)
        expect(ours[way] == theirs[static_cast<std::size_t>(threads.rank()) * count + way],
               "{}: rank {} has other bits as a process than as a thread", ways_of(threads.size())[way],
               threads.rank());
    });
  }
  processes.group().barrier();
}

}  // namespace

int main() {
  int rank = 0;
  try {
    run_ranks(0, [&](World& world) {
      rank = world.rank();
      same_bits_as_threads(world);
      check_scaled_runs(world);
    });
  } catch (const std::exception& error) {
    std::cerr << "failed on rank " << rank << ": " << error.what() << std::endl;
    if (rank == 0) std::cout << "sherd-tests: 0 passed, 1 failed, 0 skipped" << std::endl;
    return 1;
  }
  if (rank == 0) std::cout << "sherd-tests: 1 passed, 0 failed, 0 skipped" << std::endl;
  return 0;
}
