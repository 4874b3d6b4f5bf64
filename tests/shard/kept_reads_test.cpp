// A module reads what another one's group has: where that is kept, or is never gathered, nobody notices who
// reads it. What ranks then do in a backward follows from the program, not from what their graphs read.
#include "autograd/autograd.h"
#include "shard/fully_shard.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr std::int64_t width = 5;

/// Reads the weight of `lender`, whether that runs or not.
struct Borrower final : nn::Layer<Borrower> {
  nn::Linear own{width, width}, lender{width, width};
  bool lends = true;
  std::pair<Tensor, Tensor> forward(const Tensor& x) {
    const Tensor y = own(x);
    return {tanh(lends ? lender(y) : y), mul(x, 2)};
  }
  void visit(auto&& on) {
    on("own", own);
    on("lender", lender);
  }
};

struct Case {
  /// By what the lender is here when the forward begins.
  enum class By { forward, evaluation, unshard, backward } by;
  bool lends;  ///< in the forward
  bool reads;  ///< between the two, on all ranks
};

Tensor input(int rank) {
  manual_seed(static_cast<std::uint64_t>(rank));
  return randn({2, width});
}

/// Rank 0's loss alone reads what comes of parameters; the others' have the history of the forward.
Tensor loss_of(Borrower& net, int rank, const Case& c) {
  Tensor term = zeros({});
  if (c.reads) term = sum(square(net.lender.weight.tensor()));
  net.lends = c.lends;
  const auto [first, second] = net(input(rank));
  return rank == 0 ? add(term, mean(square(first))) : mean(square(second));
}

/// What it returns holds what was kept.
Tensor keep(Borrower& net, int rank, Case::By by) {
  net.lends = true;
  const auto forward = [&] { return mean(square(net(input(rank)).first)); };
  switch (by) {
    case Case::By::forward:
      return forward();
    case Case::By::evaluation: {
      const NoGrad guard;
      return forward();
    }
    case Case::By::unshard:
      shard::unshard(net.lender);
      return {};
    case Case::By::backward:
      shard::set_reshard_after_backward(net, false);
      forward().backward();
      net.zero_grad();
      return {};
  }
  return {};
}

void check_case(World& world, const shard::Options& options, const Case& c) {
  manual_seed(3);
  Borrower by_hand;
  nn::tie(by_hand.lender.weight, by_hand.own.weight);
  Borrower net = by_hand.clone();
  shard::fully_shard(net.lender, options);
  shard::fully_shard(net, options);
  for (int step = 0; step < 2; ++step) {
    const Tensor kept = keep(net, world.rank(), c.by);
    const Tensor loss = loss_of(net, world.rank(), c);
    if (kept.defined() && kept.requires_grad()) kept.backward();
    net.zero_grad();
    if (loss.requires_grad()) loss.backward();
    const Gradients expected = average_by_hand(by_hand, world.size(), [&](int rank) {
      const Tensor theirs = loss_of(by_hand, rank, c);
      if (theirs.requires_grad()) theirs.backward();
    });
    expect_gradients(net, world, as_sharded(expected, net), "kept");
    net.zero_grad();
    shard::reshard(net);
  }
}

}  // namespace

TEST_CASE("what is read while it is kept, or never gathered, is of the plan on all ranks") {
  using enum shard::ShardingStrategy;
  for (const int ranks : {2, 3})
    for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
      for (const shard::ShardingStrategy strategy : {full_shard, zero1, no_shard})
        for (const Case::By by :
             {Case::By::forward, Case::By::evaluation, Case::By::unshard, Case::By::backward})
          for (const bool lends : {true, false})
            for (const bool reads : {true, false}) {
              INFO(ranks << " ranks, layout " << static_cast<int>(layout) << ", strategy "
                         << static_cast<int>(strategy) << ", kept by " << static_cast<int>(by) << ", lends "
                         << lends << ", reads " << reads);
              CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
                check_case(world, {.layout = layout, .strategy = strategy, .reshard_after_forward = false},
                           {by, lends, reads});
              }));
            }
}

TEST_CASE("a loss may use on some ranks what was read after unshard, beside a forward that did not") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Borrower by_hand;
    Borrower net = by_hand.clone();
    shard::fully_shard(net.lender, {.layout = layout});
    shard::fully_shard(net, {.layout = layout});
    net.lends = by_hand.lends = false;
    const auto loss_of = [&](Borrower& of, int rank) {
      const Tensor y = mean(square(of(input(rank)).first));
      if (&of == &net) shard::unshard(net.lender);
      const Tensor read = sum(square(of.lender.weight.tensor()));
      return rank == 0 ? add(y, read) : y;
    };
    for (int step = 0; step < 2; ++step) {
      loss_of(net, world.rank()).backward();
      const Gradients expected =
          average_by_hand(by_hand, world.size(), [&](int rank) { loss_of(by_hand, rank).backward(); });
      expect_gradients(net, world, as_sharded(expected, net), "after unshard");
      net.zero_grad();
    }
  });
}
