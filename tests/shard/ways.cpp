#include <algorithm>

#include "shard/fsdp.h"
#include "tests/shard/parity_table.h"

namespace sherd::test {
namespace {

using shard::Options;

using Wrap = std::function<void(Net&, World&)>;

Way sharded(std::string name, Wrap wrap, NetOptions net = {}) {
  const auto begin = [net, wrap = std::move(wrap)](World& world) -> std::unique_ptr<Trainee> {
    return std::make_unique<Sharded>(net, world, [&](Net& n) { wrap(n, world); });
  };
  return {std::move(name), begin};
}

Way grouped(std::string name, const Options& options, NetOptions net = {}) {
  return sharded(std::move(name), [options](Net& n, World&) { shard_blocks_and_rest(n, options); }, net);
}

/// Replicas of shards.
Way hybrid(std::string name, const std::vector<int>& sizes, const Options& options) {
  return sharded(std::move(name), [sizes, options](Net& n, World& world) {
    Options over_grid = options;
    over_grid.mesh = world.mesh(sizes, {"replica", "shard"});
    shard_blocks_and_rest(n, over_grid);
  });
}

Way fsdp(std::string name, const shard::FsdpOptions& options) {
  return sharded(std::move(name), [options](Net& n, World&) {
    shard::FsdpOptions wrapped = options;
    wrapped.auto_wrap = shard::wrap_classes({"Block"});
    const shard::FullyShardedDataParallel handle(n, wrapped);
  });
}

void add_replicas(std::vector<Way>& ways) {
  ways.push_back({"average by hand", [](World& w) { return std::make_unique<Replica>(NetOptions{}, w); }});
  ways.push_back({"data parallel", [](World& w) { return std::make_unique<Parallel>(NetOptions{}, w); }});
  ways.push_back({"one rank", [](World& w) { return std::make_unique<WholeBatch>(NetOptions{}, w); }});
}

/// Both layouts: what holds for one holds for the other.
void add_layouts(std::vector<Way>& ways) {
  using enum shard::ShardingStrategy;
  for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat}) {
    const bool flat = layout == shard::GroupLayout::flat;
    const std::string name = flat ? "flat" : "per parameter", recomputed = flat ? "flat, " : "";
    ways.push_back(grouped(name, {.layout = layout}));
    ways.push_back(grouped(name + ", shard_grad_op", {.layout = layout, .strategy = shard_grad_op}));
    ways.push_back(grouped(name + ", zero1", {.layout = layout, .strategy = zero1}));
    ways.push_back(grouped(name + ", no_shard", {.layout = layout, .strategy = no_shard}));
    ways.push_back(
        grouped(name + ", kept after forward", {.layout = layout, .reshard_after_forward = false}));
    ways.push_back(grouped(recomputed + "kept by pairs", {.layout = layout, .reshard_after_forward = 2}));
    for (int depth : {0, 2, 3})
      ways.push_back(grouped(fmt::format("{}, prefetch {}", name, depth),
                             {.layout = layout, .forward_prefetch = depth, .backward_prefetch = depth}));
    for (const int groups : {1, 2})
      ways.push_back(grouped(fmt::format("{}, prefetch {} after reductions", name, groups),
                             {.layout = layout, .backward_prefetch = shard::BackwardPrefetch::post(groups)}));
    ways.push_back(sharded(name + ", prefetch by names", [layout](Net& n, World&) {
      shard_blocks_and_rest(n, {.layout = layout});
      shard::set_modules_to_forward_prefetch(n, {&n.blocks[1], &n.blocks[0]});
      shard::set_modules_to_backward_prefetch(n.blocks[2], {&n.blocks[0], &n});
    }));
    ways.push_back(grouped(recomputed + "recomputed inside blocks", {.layout = layout},
                           {.recomputed = Recomputed::inside}));
    ways.push_back(
        grouped(recomputed + "recomputed blocks", {.layout = layout}, {.recomputed = Recomputed::blocks}));
    ways.push_back(grouped(recomputed + "recomputed across groups", {.layout = layout},
                           {.recomputed = Recomputed::across_groups}));
    ways.push_back(sharded(flat ? "one flat group" : "one group",
                           [layout](Net& n, World&) { shard::fully_shard(n, {.layout = layout}); }));
    ways.push_back(hybrid(recomputed + "hybrid", {2, 2}, {.layout = layout}));
    ways.push_back(hybrid(recomputed + "hybrid, replicas alone", {4, 1}, {.layout = layout}));
    ways.push_back(hybrid(recomputed + "hybrid, shards alone", {1, 4}, {.layout = layout}));
    const Options in_bf16{.layout = layout, .mixed_precision = {.reduce_dtype = bf16}};
    ways.push_back(grouped(recomputed + "reduced in bf16", in_bf16));
    ways.push_back(hybrid(recomputed + "hybrid, reduced in bf16", {2, 2}, in_bf16));
  }
  ways.push_back(sharded("mixed layouts", [](Net& n, World&) {
    shard::fully_shard(n.blocks[0], {.layout = shard::GroupLayout::flat});
    shard::fully_shard(n.blocks[1], {.strategy = no_shard});
    shard::fully_shard(n.blocks[2], {.layout = shard::GroupLayout::flat, .strategy = shard_grad_op});
    shard::fully_shard(n, {});
  }));
}

void add_fsdp(std::vector<Way>& ways) {
  using enum shard::ShardingStrategy;
  for (const bool original : {true, false}) {
    const std::string name = original ? "FSDP, original parameters" : "FSDP, flat parameter";
    ways.push_back(fsdp(name, {.use_orig_params = original}));
    ways.push_back(fsdp(name + ", shard_grad_op", {.strategy = shard_grad_op, .use_orig_params = original}));
    ways.push_back(fsdp(name + ", no_shard", {.strategy = no_shard, .use_orig_params = original}));
  }
  ways.push_back(sharded("FSDP, hybrid", [](Net& n, World& world) {
    const shard::FullyShardedDataParallel handle(
        n, {.mesh = world.mesh({2, 2}, {"replica", "shard"}), .auto_wrap = shard::wrap_classes({"Block"})});
  }));
}

}  // namespace

const std::vector<Way>& ways() {
  static const std::vector<Way> all = [] {
    std::vector<Way> ways;
    add_replicas(ways);
    add_layouts(ways);
    add_fsdp(ways);
    return ways;
  }();
  return all;
}

Record record_of(std::string_view name, World& world) {
  const auto way = std::ranges::find(ways(), name, &Way::name);
  if (way == ways().end()) throw std::runtime_error(fmt::format("no way is called '{}'", name));
  const std::unique_ptr<Trainee> trainee = way->begin(world);
  return train(*trainee, 5);
}

}  // namespace sherd::test
