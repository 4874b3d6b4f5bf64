// Calls of every kind in a captured step, on whatever devices: replays give the bits of the step.
#pragma once

#include <array>
#include <chrono>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "autograd/capture/capture.h"
#include "collectives/observe.h"
#include "collectives/world.h"
#include "runtime/apply.h"
#include "runtime/backend.h"
#include "runtime/ops.h"
#include "tests/catch.h"
#include "tests/rank_device.h"
#include "tests/ranks.h"
#include "tests/runtime/harness.h"
#include "tests/sanitizer.h"

namespace sherd::test {

/// A step with a call of each kind: on `x`, of `n` elements for each of `size` ranks, and on halves of it.
inline std::vector<Tensor> calls_of_each_kind(const Group& group, const Tensor& x, std::int64_t n) {
  const std::int64_t size = group.size();
  const TensorOptions like{x.dtype(), x.device()};
  const NoGrad guard;
  std::vector<Tensor> out;
  const auto made = [&](std::int64_t count) { return out.emplace_back(empty({count}, like)); };
  const Tensor mine = narrow(x, 0, 0, n);
  group.all_gather(made(size * n), mine);
  Tensor inside = made(size * n);
  copy_(narrow(inside, 0, group.rank() * n, n), mine);
  group.all_gather(inside, narrow(inside, 0, group.rank() * n, n));  // in place
  group.all_to_all(made(size * n), x);
  std::vector<ReduceOp> reductions{ReduceOp::sum(), ReduceOp::max()};
  if (is_floating(x.dtype())) {
    reductions.push_back(ReduceOp::average());
    reductions.push_back(ReduceOp::prescaled_sum(0.3f));
  }
  for (const ReduceOp reduction : reductions) {
    group.reduce_scatter(made(n), x, reduction);
    Tensor sum = made(n);
    copy_(sum, mine);
    group.all_reduce(sum, reduction);
  }
  for (int root = 0; root < size; ++root) {
    Tensor value = made(n);
    copy_(value, mine);
    group.broadcast(value, root);
  }
  // Several segments, posted before others and waited for later; what they read is written meanwhile.
  const Tensor a = mul(mine, 2), b = mul(x, 3), wide = made(size * n), wider = made(size * size * n);
  Work work = group.enqueue({CollectiveKind::all_gather, {a, b}, {wide, wider}, {}, -1, 1, "two"});
  Tensor between = made(n);
  copy_(between, mine);
  group.all_reduce(between);
  work.wait();
  out.push_back(add(narrow(wide, 0, 0, n), between));
  work.wait_inputs();
  fill_(a, 0);
  return out;
}

/// Whether the devices make the calls of replays, or the hosts.
enum class Makes { devices, hosts };

inline void check_captured_calls(std::string_view where, std::vector<int> worlds, Makes makes) {
  for (const int ranks : worlds)
    for (const DType dtype : {f32, bf16, f64, i64, u8})
      for (const std::int64_t n : {1, 3, 1024, 4099}) {
        INFO(ranks << " ranks, " << n << " of " << name_of(dtype) << " on " << where);
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          const Device device = rank_device(where);
          const auto inputs = [&](int i) {
            manual_seed(static_cast<std::uint64_t>(17 * i + world.rank()));
            return std::vector{to(to(randint(0, 100, {ranks * n}, {i64}), dtype), device)};
          };
          const Step step = [&](std::span<const Tensor> in) {
            return calls_of_each_kind(world.group(), in[0], n);
          };
          Program program = capture(step, inputs(0));
          for (int i = 1; i < 7; ++i) {
            const std::vector<Tensor> in = inputs(i), wanted = step(in);
            const std::uint64_t before = collective_calls();
            const std::vector<Tensor> got = program.replay(in);
            const std::uint64_t calls = collective_calls() - before;
            if (i > 2) expect((calls == 1) == (makes == Makes::devices), "the hosts made {} calls", calls);
            for (std::size_t k = 0; k < wanted.size(); ++k)
              expect(same_bits(got[k], wanted[k]), "replay {}: result {} differs", i, k);
          }
          expect(program.is_device_graph(), "not a graph");
        }));
      }
}

// ---- what goes wrong between the hosts' agreement and the devices' calls ----

/// Brings values of the host to a device, unless this rank is told to fail.
struct Bring {
  static constexpr std::string_view name = "bring";
  static constexpr bool differentiable = false;
  static constexpr bool crosses_devices = true;
  Device device;
  static inline thread_local bool fails = false;
  Specs infer(SpecSpan in) const { return {Spec{in[0].shape, in[0].dtype, device}}; }
  void run(Inputs in, Outputs out) const {
    if (std::exchange(fails, false)) throw std::runtime_error("nothing to bring");
    backend(device.type).copy(out[0].raw(), device, in[0].raw(), Device::cpu(), 4);
  }
  bool operator==(const Bring&) const = default;
};

/// What a rank does in place of the replay that the others make.
enum class Instead { nothing, throws, other_call, fails_within, is_observed, other_alignment };

inline void check_captured_faults(std::string_view where) {
  for (const Instead instead : {Instead::nothing, Instead::throws, Instead::other_call, Instead::fails_within,
                                Instead::is_observed, Instead::other_alignment})
    for (const int culprit : {0, 1}) {
      INFO("instead " << static_cast<int>(instead) << ", rank " << culprit << ", on " << where);
      const bool faulty =
          instead == Instead::throws || instead == Instead::other_call || instead == Instead::fails_within;
      std::array<std::string, 2> heard;
      const auto body = [&](World& world) {
        const Device device = rank_device(where);
        const NoGrad guard;
        const Tensor rate = Tensor::scalar(2.0f);
        const Step step = [&](std::span<const Tensor> in) {
          Tensor sum = mul(in[0], apply(Bring{device}, rate));
          world.group().all_reduce(sum);
          world.group().all_reduce(sum);
          return std::vector{sum};
        };
        const Tensor x = ones({1000}, {f32, device}), off = narrow(ones({1001}, {f32, device}), 0, 1, 1000);
        Program program = capture(step, {x});
        for (int i = 0; i < 3; ++i)
          expect(program.replay({x})[0].to_vector<float>()[999] == 8, "not the sum");
        expect(program.is_device_graph(), "not a graph");
        const bool mine = world.rank() == culprit;
        std::optional<Interception> interception;
        if (mine && instead == Instead::is_observed)
          interception.emplace([](const ObservedCall& call, const Interception::Proceed& proceed) {
            proceed(call.collective);
          });
        if (mine && instead == Instead::throws) throw std::runtime_error("enough");
        if (mine && instead == Instead::fails_within) Bring::fails = true;
        try {
          if (mine && instead == Instead::other_call) {
            world.group().all_reduce(x);
          } else {
            const Tensor& in = mine && instead == Instead::other_alignment ? off : x;
            expect(program.replay({in})[0].to_vector<float>()[999] == 8, "not the sum");
          }
          world.group().barrier();
          if (!faulty)
            for (int i = 0; i < 3; ++i)
              expect(program.replay({x})[0].to_vector<float>()[999] == 8, "not the sum");
        } catch (const std::exception& e) {
          std::string& words = heard[static_cast<std::size_t>(world.rank())] = e.what();
          if (!mine) words += message_of<CollectiveError>([&] { world.group().barrier(); });
          throw;
        }
      };
      const auto begin = std::chrono::steady_clock::now();
      if (!faulty) {
        CHECK_NOTHROW(run_ranks(2, body));
        continue;
      }
      CHECK_THROWS(run_ranks(2, body));
      CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(sanitized ? 20 : 2));
      const std::string& other = heard[static_cast<std::size_t>(1 - culprit)];
      CAPTURE(heard);
      if (instead == Instead::throws) CHECK_THAT(other, Catch::Matchers::ContainsSubstring("enough"));
      if (instead == Instead::other_call)
        CHECK_THAT(other, Catch::Matchers::ContainsSubstring("a captured step of 2 calls"));
      if (instead == Instead::fails_within)
        CHECK_THAT(other, Catch::Matchers::ContainsSubstring("captured step"));
    }
}

}  // namespace sherd::test
