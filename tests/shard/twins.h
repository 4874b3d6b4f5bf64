// A sharded net beside an unsharded one with the same values, and what they must have in common.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "tests/catch.h"
#include "tests/ranks.h"
#include "tests/shard/nets.h"
#include "tests/shard/whole.h"

namespace sherd::test {

/// Runs `body(world, layout)` on worlds of 2 and 3, in both layouts.
template <class F>
void on_ranks(F&& body) {
  for (const int ranks : {2, 3})
    for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat}) {
      INFO(ranks << " ranks, " << (layout == shard::GroupLayout::flat ? "flat" : "per parameter"));
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) { body(world, layout); }));
    }
}

/// `act` throws an E whose text has `words`.
template <class E>
void expect_refused(const std::function<void()>& act, std::string_view words) {
  std::string line = "nothing was thrown";
  try {
    act();
  } catch (const E& e) {
    line = e.what();
  }
  expect(line.find(words) != line.npos, "instead of '{}': {}", words, line);
}

/// Widths whose gathers travel inside a post, and beside it.
inline constexpr std::array<std::int64_t, 2> widths = {5, 40};

/// Runs `body(world, layout, width)`.
template <class F>
void on_ranks_and_widths(F&& body) {
  on_ranks([&](World& world, shard::GroupLayout layout) {
    for (const std::int64_t width : widths) body(world, layout, width);
  });
}

/// An uneven net, unsharded and sharded.
struct Twins {
  Net by_hand, net;
  explicit Twins(const shard::Options& options, NetOptions net_options = {.uneven = true});
};

Tensor loss_at(Net& net, int rank, int step);
/// The average of all ranks' gradients of one plain step.
Gradients plain(Net& by_hand, World& world, int step);

void expect_gradients(const nn::Module& module, World& world, const Gradients& expected, const char* when);
/// The whole parameters and buffers of `net`: names, dtypes and bits.
void expect_values(nn::Module& net, const nn::Module& by_hand, const char* when);

/// A step of both, with plain averages.
void step_both(Twins& twins, nn::Optimizer& of_net, nn::Optimizer& of_by_hand, World& world, int step);

}  // namespace sherd::test
