// What a sharded model holds memory for, and what is left when one rank has too little of it.
#include "runtime/memory.h"

#include <sherd.h>

#include <algorithm>
#include <limits>

#include "tests/allocated.h"
#include "tests/catch.h"
#include "tests/ranks.h"

using namespace sherd;
using namespace sherd::test;

namespace {

struct Net final : nn::Layer<Net> {
  nn::Linear a{64, 64}, b{64, 64}, c{64, 64};
  std::function<void()> between;
  Tensor forward(const Tensor& x) {
    const Tensor y = b(a(x));
    if (between) between();
    return c(y);
  }
  void visit(auto&& on) {
    on("a", a);
    on("b", b);
    on("c", c);
  }
};

std::int64_t held(MemoryUse use) { return Context::current().memory().held(DeviceType::cpu)[use]; }

void shard_all(Net& net, const shard::Options& options) {
  for (nn::Linear* m : {&net.a, &net.b, &net.c}) shard::fully_shard(*m, options);
  shard::fully_shard(net, options);
}

Tensor loss_of(Net& net, std::int64_t rows) { return mean(square(net(ones({rows, 64})))); }

}  // namespace

TEST_CASE("memory: of a sharded model, shards are parameters and what is gathered is gathered") {
  for (const int ranks : {2, 3})
    for (const auto layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
      run_ranks(ranks, [&](World& world) {
        manual_seed(1);
        const std::int64_t parameters = held(MemoryUse::parameters);
        Net net;
        const std::int64_t whole = held(MemoryUse::parameters) - parameters;
        shard_all(net, {.mesh = world.mesh(), .layout = layout, .reshard_after_forward = false});
        const std::int64_t shards = held(MemoryUse::parameters) - parameters;
        expect(shards > 0 && shards * ranks < whole * 5 / 4, "{} bytes of shards, {} whole", shards, whole);
        std::int64_t most = 0;
        net.between = [&] { most = held(MemoryUse::gathered); };
        nn::AdamW optimizer(net.parameters());
        for (int step = 0; step < 2; ++step) {
          loss_of(net, 4).backward();
          expect(most > 0, "nothing was gathered");
          expect(held(MemoryUse::gathered) == 0, "{} bytes stay gathered", held(MemoryUse::gathered));
          expect(held(MemoryUse::gradients) > 0, "no gradients");
          optimizer.step();
          optimizer.zero_grad();
          expect(held(MemoryUse::parameters) - parameters == shards, "shards grew to {} bytes",
                 held(MemoryUse::parameters) - parameters);
        }
      });
  SUCCEED();
}

TEST_CASE("memory: between forward and backward a slice is kept, however often a module ran") {
  for (const auto layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
    CHECK_NOTHROW(run_ranks(4, [&](World& world) {
      Net net;
      shard_all(net, {.mesh = world.mesh(), .layout = layout, .reshard_after_forward = 2});
      const auto kept = [&] {
        std::int64_t least = held(MemoryUse::gathered);  // peers let go of what they have read a little later
        for (int i = 0; i < 20; ++i) {
          world.group().barrier();
          least = std::min(least, held(MemoryUse::gathered));
        }
        return least;
      };
      const Tensor first = loss_of(net, 4);
      const std::int64_t once = kept();
      const Tensor second = loss_of(net, 4);
      const std::int64_t twice = kept();
      {
        const NoGrad guard;
        loss_of(net, 4);
      }
      const std::int64_t evaluated = kept();
      expect(once > 0 && twice == once && evaluated == once, "{} bytes, then {}, then {}", once, twice,
             evaluated);
      first.backward();
      second.backward();
      expect(kept() == 0, "{} bytes stay", kept());
    }));
}

TEST_CASE("memory: an output that is held costs nothing a step, whatever is read outside forwards") {
  CHECK_NOTHROW(run_ranks(2, [&](World& world) {
    nn::Linear net(6, 6);
    shard::fully_shard(net, {.mesh = world.mesh()});
    nn::Sgd optimizer(net.parameters(), {.lr = 0.001});
    const Tensor held = net(ones({1, 6}));
    // What an allocator keeps for threads and what late peers hold comes and goes; what is lost grows in each
    // window.
    constexpr int window = 500;  // steps
    std::int64_t before = 0, least = std::numeric_limits<std::int64_t>::max();
    for (int step = 0; step <= 7 * window; ++step) {
      if (step % window == 0) {
        world.group().barrier();
        const std::int64_t now = allocated_bytes();
        if (step > window) least = std::min(least, now - before);
        before = now;
        world.group().barrier();
      }
      add(sum(net(ones({1, 6}))), sum(square(net.weight.tensor()))).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    expect(least < 8 * window, "every {} steps of two ranks grew by {} bytes at least", window, least);
  }));
}

TEST_CASE(
    "memory: too little of it on one rank is an error on all, and after a renewal a smaller step runs") {
  for (const int ranks : {2, 3})
    for (const int culprit : {0, 1})
      for (const auto layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
        run_ranks(ranks, [&](World& world) {
          const auto trained = [&](bool fails) {
            manual_seed(1);
            Net net;
            shard_all(net, {.mesh = world.mesh(), .layout = layout});
            nn::AdamW optimizer(net.parameters());
            const auto step = [&](std::int64_t rows) {
              loss_of(net, rows).backward();
              shard::clip_grad_norm_(net.parameters(), 1.0);
              optimizer.step();
              optimizer.zero_grad();
            };
            step(4);
            if (fails) {
              const bool mine = world.rank() == culprit;
              CpuPool& pool = Context::current().cpu_pool();
              if (mine) {
                pool.trim();
                pool.set_limit(pool.system_bytes() + (std::size_t{5} << 19));  // the input and one result
              }
              std::string heard;
              try {
                step(mine ? 4096 : 4);  // a megabyte a layer
              } catch (const OutOfMemoryError& error) {
                heard = error.what();
                expect(mine, "rank {} is short of memory: {}", world.rank(), heard);
                expect(heard.find("gathered ") != heard.npos && heard.find("optimizer ") != heard.npos,
                       "what is held is not said: {}", heard);
              } catch (const CollectiveError& error) {
                heard = error.what();
                expect(!mine, "the culprit heard {}", heard);
              }
              expect(!heard.empty(), "rank {} heard nothing", world.rank());
              pool.set_limit(CpuPool::no_limit);
              world.group().renew();
              optimizer.zero_grad();
            }
            step(4);
            return shard::full_state_dict(net);
          };
          const nn::StateDict expected = trained(false), found = trained(true);
          for (std::size_t i = 0; i < expected.size(); ++i)
            expect(found[i].second.to_vector<float>() == expected[i].second.to_vector<float>(),
                   "{} has other values", found[i].first);
        });
  SUCCEED();
}
