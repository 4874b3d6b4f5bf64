// The cross product: tied x uneven x frozen x dtypes x strategy x layout x recomputation, against replicas.
#include <array>

#include "tests/catch.h"
#include "tests/ranks.h"
#include "tests/sanitizer.h"
#include "tests/shard/trainees.h"

using namespace sherd;
using namespace sherd::test;

namespace {

using shard::GroupLayout, shard::MixedPrecisionPolicy, shard::ShardingStrategy;

template <class T>
struct Named {
  const char* name;
  T value;
};

constexpr std::array ties = {Named{"not tied", Tied::no}, Named{"tied within a group", Tied::within_group},
                             Named{"tied across groups", Tied::across_groups}};
constexpr std::array rows = {Named{"even", false}, Named{"uneven", true}};
constexpr std::array frozen = {Named{"all trained", Frozen::no}, Named{"biases frozen", Frozen::biases},
                               Named{"a group frozen", Frozen::whole_group}};
const std::array dtypes = {
    Named{"f32", MixedPrecisionPolicy{}},
    Named{"bf16", MixedPrecisionPolicy{.param_dtype = bf16, .reduce_dtype = f32}},
    Named{"bf16 reduced in bf16", MixedPrecisionPolicy{.param_dtype = bf16, .reduce_dtype = bf16}}};
constexpr std::array strategies = {Named{"full_shard", ShardingStrategy::full_shard},
                                   Named{"shard_grad_op", ShardingStrategy::shard_grad_op},
                                   Named{"zero1", ShardingStrategy::zero1},
                                   Named{"no_shard", ShardingStrategy::no_shard}};
constexpr std::array layouts = {Named{"per parameter", GroupLayout::per_parameter},
                                Named{"flat", GroupLayout::flat}};
constexpr std::array recomputations = {Named{"nothing again", Recomputed::no},
                                       Named{"blocks again", Recomputed::blocks}};

/// What is the same for all ways to shard.
struct Case {
  std::string name;
  NetOptions net;
  MixedPrecisionPolicy mixed;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& tie : ties)
    for (const auto& row : rows)
      for (const auto& f : frozen)
        for (const auto& dtype : dtypes)
          all.push_back({fmt::format("{}, {}, {}, {}", tie.name, row.name, f.name, dtype.name),
                         {.tied = tie.value, .uneven = row.value, .frozen = f.value},
                         dtype.value});
  return all;
}

/// Every strategy and layout, with and without recomputation, gives what replicas give.
void expect_parity(World& world, const Case& c, int steps) {
  Replica replica(c.net, world, c.mixed);
  const Record reference = train(replica, steps);
  for (const auto& strategy : strategies)
    for (const auto& layout : layouts)
      for (const auto& recomputation : recomputations) {
        NetOptions options = c.net;
        options.recomputed = recomputation.value;
        Sharded trainee(options, world, [&](Net& net) {
          shard_blocks_and_rest(
              net, {.layout = layout.value, .strategy = strategy.value, .mixed_precision = c.mixed});
        });
        const std::string found = difference(train(trainee, steps), reference);
        expect(found.empty(), "{}, {}, {}, {}: {}", c.name, strategy.name, layout.name, recomputation.name,
               found);
      }
}

void expect_parity_of_all(const std::vector<int>& rank_counts, int steps) {
  for (const int ranks : rank_counts)
    for (const Case& c : cases()) {
      INFO(ranks << " ranks");
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) { expect_parity(world, c, steps); }));
    }
}

}  // namespace

TEST_CASE("every combination of what a net can be and how it can be sharded trains like replicas",
          "[threads meet]") {
  // The sanitizers take thirty and five times as long, and ranks meet alike in both worlds.
  expect_parity_of_all(sanitized ? std::vector{3} : std::vector{2, 3}, 2);
}

TEST_CASE("every combination trains like replicas for long", "[.soak]") {
  expect_parity_of_all({2, 3, 4}, 25);
}

TEST_CASE("replicas train like one rank on the whole batch") {
  for (const int ranks : {2, 3})
    for (const Case& c : cases()) {
      if (c.mixed.param_dtype) continue;  // 16 bits have no tolerance after several steps
      INFO(c.name << ", " << ranks << " ranks");
      std::vector<Record> many(static_cast<std::size_t>(ranks)), one = many;
      run_ranks(ranks, [&](World& world) {
        const auto rank = static_cast<std::size_t>(world.rank());
        Replica replica(c.net, world);
        many[rank] = train(replica, 2);
        WholeBatch whole(c.net, world);
        one[rank] = train(whole, 2);
      });
      CHECK(difference_beyond_tolerance(many, one) == "");
    }
}
