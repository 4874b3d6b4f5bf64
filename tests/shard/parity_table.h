// Which ways to train the same net on the same data give the same numbers. The tests read this table
// (parity_test.cpp on threads, parity_processes.cpp on processes); `ways` has what the names mean.
#pragma once

#include <string_view>
#include <vector>

#include "tests/shard/trainees.h"

namespace sherd::test {

enum class Equality { to_the_bit, within_tolerance };

/// Each of `ways` gives what `reference` gives: losses, gradient norms and whole parameters after some steps
/// of Adam on clipped gradients, every rank on data of its own.
struct ParityRow {
  std::string_view reference;
  std::vector<std::string_view> ways;
  std::vector<int> worlds;
  Equality equality = Equality::to_the_bit;
};

inline const std::vector<ParityRow> parity_table = {
    {.reference = "average by hand",
     .ways = {"data parallel", "per parameter", "flat", "FSDP, original parameters", "FSDP, flat parameter"},
     .worlds = {1, 2, 3, 4}},
    {.reference = "average by hand",
     .ways = {"per parameter, shard_grad_op", "per parameter, zero1", "per parameter, no_shard",
              "per parameter, kept after forward", "flat, shard_grad_op", "flat, zero1", "flat, no_shard",
              "flat, kept after forward", "FSDP, original parameters, shard_grad_op",
              "FSDP, original parameters, no_shard", "FSDP, flat parameter, shard_grad_op",
              "FSDP, flat parameter, no_shard", "one group", "one flat group", "mixed layouts"},
     .worlds = {2, 3, 4}},
    {.reference = "per parameter",
     .ways = {"per parameter, prefetch 0", "per parameter, prefetch 2", "per parameter, prefetch 3",
              "per parameter, prefetch 1 after reductions", "per parameter, prefetch 2 after reductions",
              "per parameter, prefetch by names", "flat, prefetch 1 after reductions",
              "flat, prefetch 2 after reductions", "flat, prefetch by names", "flat, prefetch 0",
              "flat, prefetch 2", "flat, prefetch 3"},
     .worlds = {2, 3, 4}},
    {.reference = "per parameter",
     .ways = {"recomputed inside blocks", "recomputed blocks", "recomputed across groups",
              "flat, recomputed inside blocks", "flat, recomputed blocks", "flat, recomputed across groups"},
     .worlds = {2, 3, 4}},
    // What stays of a group after forward is a slice for two ranks.
    {.reference = "per parameter", .ways = {"kept by pairs", "flat, kept by pairs"}, .worlds = {2, 4}},
    // Sums over other ranks are made in another order.
    {.reference = "one rank",
     .ways = {"average by hand", "data parallel", "per parameter", "flat"},
     .worlds = {2, 3, 4},
     .equality = Equality::within_tolerance},
    {.reference = "one rank",
     .ways = {"hybrid", "flat, hybrid", "FSDP, hybrid"},
     .worlds = {4},
     .equality = Equality::within_tolerance},
    {.reference = "hybrid", .ways = {"flat, hybrid", "FSDP, hybrid"}, .worlds = {4}},
    // Terms of 8 bits: sums over shards and then over replicas are exact, and both round once.
    {.reference = "reduced in bf16",
     .ways = {"flat, reduced in bf16", "hybrid, reduced in bf16", "flat, hybrid, reduced in bf16"},
     .worlds = {4}},
    // One of the two calls falls away.
    {.reference = "average by hand",
     .ways = {"hybrid, replicas alone", "flat, hybrid, replicas alone", "hybrid, shards alone",
              "flat, hybrid, shards alone"},
     .worlds = {4}},
};

/// A name in the table, and how a training of that name begins on a rank.
struct Way {
  std::string name;
  std::function<std::unique_ptr<Trainee>(World&)> begin;
};
const std::vector<Way>& ways();
/// Trains in the way of that name.
Record record_of(std::string_view way, World& world);

}  // namespace sherd::test
