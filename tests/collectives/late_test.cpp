// The suite on a device that works later: only what the transport orders by events is in order there.
#include <sherd.h>

#include <thread>

#include "tests/catch.h"
#include "tests/collectives/random_faults.h"
#include "tests/collectives/suite.h"
#include "tests/late_device.h"
#include "tests/sanitizer.h"

using namespace sherd;

TEST_CASE("what holds for every group holds for tensors of devices that work later") {
  for (const test::Section& section : test::device_sections())
    for (int world : test::worlds()) {
      INFO(section.name << ", world of " << world);
      CHECK_NOTHROW(run_ranks(world, [&](World& w) {
        const test::CasesOn cases(test::late_device(w.rank() % 2));
        section.run(w.group());
      }));
    }
}

TEST_CASE("a random fault in a random program on devices that work later: every rank hears whose it is") {
  CHECK(test::complaints_of_random_faults(0, 60, {.device = to_string(test::late_device())}) ==
        std::vector<std::string>());
}

TEST_CASE("tensors of devices that work later pass into ranks and out of them") {
  for (int round = 0; round < 20; ++round) {
    const Device there = test::late_device(round % 2);
    Tensor x = full({500}, 1, {DType::f32, there});
    for (int i = 0; i < 10; ++i) x = x + 1.0;
    std::vector<Tensor> results(3);
    run_ranks(3, [&](World& w) {
      const Tensor mine = x * static_cast<double>(w.rank() + 1);
      results[static_cast<std::size_t>(w.rank())] = mine + mine;
    });
    for (std::size_t r = 0; r < 3; ++r)
      CHECK(results[r].to_vector<float>() == std::vector<float>(500, 22.f * static_cast<float>(r + 1)));
  }
}

TEST_CASE("a thread reads what another one computed and waited for") {
  for (int round = 0; round < 20; ++round) {
    const Device there = test::late_device(round % 2);
    Tensor x = full({500}, 1, {DType::f32, there});
    for (int i = 0; i < 10; ++i) x = x + 1.0;
    if (round % 3 == 0)
      synchronize();
    else
      synchronize(there);
    std::vector<float> seen;
    std::thread([&] { seen = (x * 2.0).to_vector<float>(); }).join();
    CHECK(seen == std::vector<float>(500, 22.f));
  }
}
