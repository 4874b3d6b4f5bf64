// Which ops of a list must follow which, by the bytes that they use.
#include "autograd/capture/order.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <set>

#include "tests/catch.h"

using sherd::OpOrder;
using sherd::Use;

namespace {

constexpr std::uintptr_t bytes = 40;

/// An op that makes each byte that it writes out of all that it reads and of who it is.
struct Op {
  std::vector<Use> uses;
  bool alone = false;
  void run(std::uint64_t self, std::array<std::uint64_t, bytes>& memory) const {
    std::uint64_t seen = self;
    for (const Use& use : uses)
      for (std::uintptr_t at = use.first; at < use.past; ++at)
        seen = (seen ^ memory[at]) * 0x9e3779b97f4a7c15;
    for (const Use& use : uses)
      for (std::uintptr_t at = use.first; use.writes && at < use.past; ++at) memory[at] = seen * (at + 1);
  }
};

std::vector<Op> random_ops(std::mt19937_64& rng, std::size_t count) {
  const auto upto = [&](std::uint64_t most) {
    return std::uniform_int_distribution<std::uint64_t>(0, most)(rng);
  };
  std::vector<Op> ops(count);
  for (Op& op : ops) {
    op.alone = upto(19) == 0;
    for (std::uint64_t k = upto(3); k-- > 0;) {
      const std::uintptr_t first = upto(bytes),
                           past = first + upto(std::min<std::uintptr_t>(9, bytes - first));
      op.uses.push_back({first, past, upto(2) == 0});
    }
  }
  return ops;
}

std::vector<std::vector<std::uint32_t>> order_of(const std::vector<Op>& ops) {
  OpOrder order;
  std::vector<std::vector<std::uint32_t>> after;
  for (const Op& op : ops) after.push_back(op.alone ? order.next_alone() : order.next(op.uses));
  return after;
}

bool conflict(const Op& a, const Op& b) {
  return std::ranges::any_of(a.uses, [&](const Use& x) {
    return std::ranges::any_of(b.uses, [&](const Use& y) {
      return (x.writes || y.writes) && std::max(x.first, y.first) < std::min(x.past, y.past);
    });
  });
}

}  // namespace

TEST_CASE("order of ops: in any that it allows every byte is as in the list's") {
  std::mt19937_64 rng(41);
  for (int program = 0; program < 300; ++program) {
    const std::vector<Op> ops = random_ops(rng, 30);
    const auto after = order_of(ops);
    std::array<std::uint64_t, bytes> start{}, expected{};
    std::iota(start.begin(), start.end(), 1);
    expected = start;
    for (std::size_t i = 0; i < ops.size(); ++i) ops[i].run(i, expected);
    for (int times = 0; times < 20; ++times) {
      auto memory = start;
      std::vector<bool> done(ops.size());
      for (std::size_t left = ops.size(); left > 0; --left) {
        std::vector<std::size_t> ready;
        for (std::size_t i = 0; i < ops.size(); ++i)
          if (!done[i] && std::ranges::all_of(after[i], [&](std::uint32_t k) { return done[k]; }))
            ready.push_back(i);
        REQUIRE(!ready.empty());
        const std::size_t next =
            times == 0 ? ready.back()
                       : ready[std::uniform_int_distribution<std::size_t>(0, ready.size() - 1)(rng)];
        ops[next].run(next, memory);
        done[next] = true;
      }
      REQUIRE(memory == expected);
    }
  }
}

TEST_CASE("order of ops: nothing follows what shares no byte that one of them writes") {
  std::mt19937_64 rng(42);
  for (int program = 0; program < 300; ++program) {
    std::vector<Op> ops = random_ops(rng, 30);
    for (Op& op : ops) op.alone = false;
    const auto after = order_of(ops);
    for (std::size_t i = 0; i < ops.size(); ++i) {
      CHECK(std::ranges::is_sorted(after[i]));
      CHECK(std::set(after[i].begin(), after[i].end()).size() == after[i].size());
      for (const std::uint32_t k : after[i]) CHECK(conflict(ops[k], ops[i]));
    }
  }
}

TEST_CASE("order of ops: one that is alone follows all before it, and all behind it follow it") {
  std::mt19937_64 rng(43);
  for (int program = 0; program < 100; ++program) {
    const std::vector<Op> ops = random_ops(rng, 40);
    const auto after = order_of(ops);
    std::vector<std::set<std::uint32_t>> all(ops.size());  // that must come before, on any way
    for (std::uint32_t i = 0; i < ops.size(); ++i)
      for (const std::uint32_t k : after[i]) {
        all[i].insert(k);
        all[i].insert(all[k].begin(), all[k].end());
      }
    for (std::uint32_t i = 0; i < ops.size(); ++i) {
      if (ops[i].alone) CHECK(all[i].size() == i);
      for (std::uint32_t k = 0; k < i; ++k)
        if (ops[k].alone) CHECK(all[i].contains(k));
    }
  }
}
