// What stays gathered outside forwards while ranks write their parts: what a rank communicates does not
// depend on whether it was the one that wrote.
#include <array>

#include "autograd/autograd.h"
#include "shard/fsdp.h"
#include "tests/message_of.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// By what the parameters are whole when one rank writes.
enum class By { forward, evaluation, read, unshard, backward };
constexpr std::array all_ways = {By::forward, By::evaluation, By::read, By::unshard, By::backward};

struct Pair final : nn::Layer<Pair> {
  nn::Linear first{5, 5}, second{5, 7};
  Tensor forward(const Tensor& x) const { return second(relu(first(x))); }
  void visit(auto&& on) {
    on("first", first);
    on("second", second);
  }
};

/// `body(world, options, by)`.
template <class F>
void on_all(F&& body) {
  using enum shard::ShardingStrategy;
  for (const int ranks : {2, 3, 4})
    for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
      for (const shard::ShardingStrategy strategy : {full_shard, shard_grad_op, zero1})
        for (const int kept : {1, 2, ranks})
          for (const By by : all_ways) {
            if (ranks % kept != 0 || (kept != ranks && strategy != full_shard)) continue;
            INFO(ranks << " ranks, layout " << static_cast<int>(layout) << ", strategy "
                       << static_cast<int>(strategy) << ", kept " << kept << ", by " << static_cast<int>(by));
            CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
              body(world,
                   shard::Options{.layout = layout, .strategy = strategy, .reshard_after_forward = kept}, by);
            }));
          }
}

Tensor read(const Net& net) {
  const NoGrad guard;
  return sum(square(net.blocks[1].in.weight.tensor()));
}

/// Leaves the values of a block whole, where the strategy does.
Tensor gathered_by(By by, Net& net, World& world) {
  switch (by) {
    case By::forward:
      return loss_at(net, world.rank(), 0);
    case By::evaluation: {
      const NoGrad guard;
      return loss_at(net, world.rank(), 0);
    }
    case By::read:
      return read(net);
    case By::unshard:
      shard::unshard(net.blocks[1]);
      return {};
    case By::backward:
      shard::set_reshard_after_backward(net, false);
      loss_at(net, world.rank(), 0).backward();
      return {};
  }
  return {};
}

/// One rank writes its part of all that the block has.
void write_part(Net& net, bool writes) {
  const NoGrad guard;
  for (const nn::Parameter& p : net.blocks[1].parameters())
    if (writes && p.local().numel() > 0) mul_(p.local(), 2);
}

/// Values of `net` on all ranks for `by_hand`.
void follow(nn::Module& by_hand, nn::Module& net) {
  const NoGrad guard;
  const nn::StateDict whole = shard::full_state_dict(net);
  std::size_t i = 0;
  for (const nn::Parameter& p : by_hand.parameters()) copy_(p.local().detach(), whole[i++].second);
}

}  // namespace

TEST_CASE("reading what one rank wrote is refused there alone, and right on all after reshard") {
  on_all([](World& world, const shard::Options& options, By by) {
    Twins twins(options);
    const Tensor held = gathered_by(by, twins.net, world);
    const bool writes = world.rank() == 0,
               whole = twins.net.blocks[1].in.weight.tensor().storage().resident();
    write_part(twins.net, writes);
    if (whole && writes) {
      const std::string message = message_of<StateError>([&] { read(twins.net); });
      expect(message.find("blocks.1") != std::string::npos || message.find("in.weight") != std::string::npos,
             "{}", message);
      expect(message.find("reshard()") != std::string::npos, "{}", message);
    } else if (whole) {
      read(twins.net);  // as it was, without a call
    }
    follow(twins.by_hand, twins.net);
    shard::reshard(twins.net);
    expect(read(twins.net).item<float>() == read(twins.by_hand).item<float>(), "a read after reshard");
  });
}

TEST_CASE("unshard and forwards agree on what one rank wrote, whatever kept it") {
  on_all([](World& world, const shard::Options& options, By by) {
    for (const bool unshards : {false, true}) {
      Twins twins(options);
      const Tensor held = gathered_by(by, twins.net, world);
      write_part(twins.net, world.rank() == world.size() - 1);
      follow(twins.by_hand, twins.net);
      if (unshards) {
        shard::unshard(twins.net.blocks[1]);
        expect(read(twins.net).item<float>() == read(twins.by_hand).item<float>(), "a read after unshard");
      }
      twins.net.zero_grad();
      loss_at(twins.net, world.rank(), 1).backward();
      expect_gradients(twins.net, world, plain(twins.by_hand, world, 1), "after the write");
    }
  });
}

TEST_CASE("a backward that does not read what one rank wrote makes the same calls on all") {
  on_all([](World& world, const shard::Options& options, By by) {
    if (by != By::forward) return;
    manual_seed(3);
    Pair by_hand;
    Pair pair = by_hand.clone();
    shard::fully_shard(pair.first, options);
    shard::fully_shard(pair, options);
    const auto loss = [](Pair& p, int rank, bool reads_first = false) {
      Tensor x = batch_of(rank, 0, 5).x;
      x.requires_grad_(reads_first);
      return sum(square(p(x)));
    };
    const Tensor held = loss(pair, world.rank());
    {
      const NoGrad guard;
      if (world.rank() == 0) mul_(pair.first.weight.local(), 2);
    }
    held.backward();
    expect_gradients(
        pair, world,
        average_by_hand(by_hand, world.size(), [&](int rank) { loss(by_hand, rank).backward(); }),
        "of the values before the write");
    follow(by_hand, pair);
    pair.zero_grad();
    loss(pair, world.rank(), true).backward();
    expect_gradients(
        pair, world,
        average_by_hand(by_hand, world.size(), [&](int rank) { loss(by_hand, rank, true).backward(); }),
        "afterwards");
  });
}
