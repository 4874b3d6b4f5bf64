// Ranks on GPUs, each on its own as far as there are enough, or all on one: threads of one process whose
// tensors stay there.
#include <sherd.h>

#include <chrono>

#include "tests/collectives/random_faults.h"
#include "tests/collectives/suite.h"
#include "tests/cuda/agree.h"
#include "tests/rank_device.h"
#include "tests/ranks.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

void sections_on(std::string_view where) {
  for (const Section& section : device_sections())
    for (int world : {1, 2, 3, 4, 8}) {
      INFO(section.name << ", world of " << world);
      CHECK_NOTHROW(run_ranks(world, [&](World& w) {
        const CasesOn cases(rank_device(where));
        section.run(w.group());
      }));
    }
}

void random_programs_on(std::string_view where) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    INFO("seed " << seed);
    CHECK_NOTHROW(run_ranks(4, [&](World& w) {
      const CasesOn cases(rank_device(where));
      random_program(w.group(), seed);
    }));
  }
}

}  // namespace

TEST_CASE("cuda ranks: what holds for every group holds for tensors on a GPU") {
  if (no_gpu()) return;
  sections_on("cuda:0");
}

TEST_CASE("cuda ranks: what holds for every group holds for tensors on several GPUs") {
  if (one_gpu()) return;
  sections_on("cuda:each");
}

TEST_CASE("cuda ranks: random programs") {
  if (no_gpu()) return;
  random_programs_on("cuda:0");
}

TEST_CASE("cuda ranks: random programs on several GPUs") {
  if (one_gpu()) return;
  random_programs_on("cuda:each");
}

TEST_CASE("cuda ranks: a short random program", "[sanitized][racechecked]") {
  if (no_gpu()) return;
  CHECK_NOTHROW(run_ranks(2, [&](World& w) {
    const CasesOn cases(gpu);
    random_program(w.group(), 17);
  }));
}

TEST_CASE("cuda ranks: a call whose tensors lie on different kinds of device is named") {
  if (no_gpu()) return;
  CHECK(one_line_about(message_of<CollectiveError>([] {
                         run_ranks(2, [](World& world) {
                           const Tensor x = ones({4}, {f32, world.rank() == 0 ? gpu : Device::cpu()});
                           world.group().all_reduce(x, ReduceOp::sum(), {.label = "sums"});
                         });
                       }),
                       "4 elements on cuda"));
}

TEST_CASE("cuda ranks: a random fault in a random program: every rank hears whose it is") {
  if (no_gpu()) return;
  CHECK(complaints_of_random_faults(0, 60, {.device = "cuda:0"}) == std::vector<std::string>());
}

TEST_CASE("cuda ranks: a random fault on several GPUs: every rank hears whose it is") {
  if (one_gpu()) return;
  CHECK(complaints_of_random_faults(60, 60, {.device = "cuda:each"}) == std::vector<std::string>());
}

TEST_CASE("cuda ranks: a fault ends what peers wait for, and the next run works") {
  if (no_gpu()) return;
  for (int again = 0; again < 2; ++again) {
    const auto begin = std::chrono::steady_clock::now();
    CHECK_THROWS_AS(run_ranks(3,
                              [](World& world) {
                                const Tensor x = ones({1 << 20}, {f32, rank_device("cuda:each")});
                                for (int i = 0; i < 20; ++i) {
                                  if (i == 11 && world.rank() == 1) throw std::runtime_error("enough");
                                  world.group().all_reduce(x);
                                }
                              }),
                    std::runtime_error);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    CHECK(took.count() < 2);
    CHECK_NOTHROW(run_ranks(3, [](World& world) {
      const Tensor x = ones({5}, {f32, rank_device("cuda:each")});
      world.group().all_reduce(x);
      expect(x.to_vector<float>()[4] == 3, "{} is not 3", x.to_vector<float>()[4]);
    }));
  }
}
