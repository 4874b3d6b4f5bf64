// The suite on ranks that are processes, started by a launcher; each runs this program:
//   mpirun -n 4 mpi_suite [DEVICE]      cuda:0, cuda:each, or late:0 or late-network:0 of tests/late_device.h
#include <sherd.h>

#include <chrono>
#include <cstdlib>
#include <iostream>

#include "runtime/ops.h"
#include "tests/collectives/suite.h"
#include "tests/late_device.h"
#include "tests/rank_device.h"
#include "tests/ranks.h"

using namespace sherd;
using test::expect;

namespace {

/// All of them for two ranks; processes that share cores take long, so larger worlds take every third, each
/// its own.
std::vector<test::CallCase> cases_for(int world) {
  const std::vector<test::CallCase> all = test::all_cases(world);
  if (world <= 2) return all;
  std::vector<test::CallCase> some;
  for (std::size_t i = static_cast<std::size_t>(world % 3); i < all.size(); i += 3) some.push_back(all[i]);
  return some;
}

/// What every case leaves behind on this rank.
std::vector<std::int64_t> digests(const Group& group) {
  std::vector<std::int64_t> digests;
  for (const test::CallCase& c : cases_for(group.size())) {
    const test::Part part(group, c);
    part.call();
    part.check();
    digests.push_back(static_cast<std::int64_t>(part.digest()));
  }
  return digests;
}

/// The first process runs as many threads and looks at what each of them got beside what each process got.
void same_bits_as_threads(const Group& processes) {
  const std::vector<std::int64_t> own = digests(processes);
  const auto cases = static_cast<std::int64_t>(own.size());
  const Tensor all = zeros({processes.size() * cases}, {i64});
  processes.all_gather(all, Tensor::from(own, {cases}));
  if (processes.rank() == 0) {
    const std::vector<std::int64_t> theirs = all.to_vector<std::int64_t>();
    run_ranks(processes.size(), [&](World& threads) {
      const std::vector<std::int64_t> ours = digests(threads.group());
      for (std::int64_t i = 0; i < cases; ++i)
        expect(
            ours[static_cast<std::size_t>(i)] == theirs[static_cast<std::size_t>(threads.rank() * cases + i)],
            "{}: rank {} has other bits as a process than as a thread",
            cases_for(threads.size())[static_cast<std::size_t>(i)].text(), threads.rank());
    });
  }
  processes.barrier();
}

/// The last rank stops for 5 s, then computes for 30 s: nobody gives it up.
void slow_rank(const Group& group) {
  const Tensor x = full({5000}, 1.0);
  group.barrier();
  if (group.rank() == group.size() - 1) {
    expect(std::system("(sleep 5; kill -CONT $PPID) & kill -STOP $PPID") == 0,
           "no shell could stop the rank");
    const auto begin = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - begin < std::chrono::seconds(30)) full({1000}, 1.0);
  }
  group.all_reduce(x);
  expect(x.to_vector<float>()[0] == static_cast<float>(group.size()), "sum {}", x.to_vector<float>()[0]);
}

class Tally {
 public:
  void run(const test::Section& section, std::string_view device = "cpu") {
    const auto begin = std::chrono::steady_clock::now();
    try {
      run_ranks(0, [&](World& world) {
        rank_ = world.rank();
        const test::CasesOn cases(test::rank_device(device));
        section.run(world.group());
      });
      ++passed_;
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      if (rank_ == 0) std::cout << took.count() << " s: " << section.name << std::endl;
    } catch (const std::exception& error) {
      ++failed_;
      std::cerr << "failed on rank " << rank_ << ": " << section.name << ": " << error.what() << std::endl;
    }
  }
  int skip(std::string_view reason) {
    run_ranks(0, [&](World& world) {
      if (world.rank() == 0)
        std::cout << "skipped: " << reason << "\nsherd-tests: 0 passed, 0 failed, 1 skipped\n";
    });
    return 0;
  }
  int report() const {
    if (rank_ == 0)
      std::cout << "sherd-tests: " << passed_ << " passed, " << failed_ << " failed, 0 skipped" << std::endl;
    return failed_ == 0 ? 0 : 1;
  }

 private:
  int rank_ = 0, passed_ = 0, failed_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  Tally tally;
  if (argc == 2 && std::string_view(argv[1]) == "slow") {
    tally.run({"a stopped and then busy rank is waited for", slow_rank});
    return tally.report();
  }
  if (argc == 2) {
    test::late_device();  // their names are known from now on
    test::late_network_device();
    if (const std::string reason = test::why_not_here(argv[1], launched_ranks()); !reason.empty())
      return tally.skip(reason);
    for (const test::Section& section : test::device_sections()) tally.run(section, argv[1]);
    return tally.report();
  }
  tally.run({"processes give the bits of the reference, and those of threads", same_bits_as_threads});
  for (const test::Section& section : test::sections().subspan(1)) tally.run(section);
  return tally.report();
}
