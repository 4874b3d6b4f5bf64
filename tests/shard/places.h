// How a small net lies on its ranks.
#pragma once

#include "collectives/world.h"
#include "nn/module.h"
#include "shard/fully_shard.h"

namespace sherd::test {

enum class Way { plain, rows, flat, zero1 };
inline constexpr Way ways[] = {Way::plain, Way::rows, Way::flat, Way::zero1};

/// Shards `inner`, a module of `net`, and then `net`.
inline void place(nn::Module& inner, nn::Module& net, const World& world, Way way) {
  if (way == Way::plain) return;
  shard::Options options{.mesh = world.mesh()};
  if (way == Way::flat) options.layout = shard::GroupLayout::flat;
  if (way == Way::zero1) options.strategy = shard::ShardingStrategy::zero1;
  shard::fully_shard(inner, options);
  shard::fully_shard(net, options);
}

}  // namespace sherd::test
