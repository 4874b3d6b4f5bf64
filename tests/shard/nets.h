// The net that tests of sharding train, its data, and the groups it is cut into.
#pragma once

#include <sherd.h>

#include <cstdint>

#include "shard/fully_shard.h"

namespace sherd::test {

/// Whether two members of a net are one parameter: of the outermost group, or of two groups.
enum class Tied { no, within_group, across_groups };
/// What runs again in backward: nothing, a part of every block, every block, or two blocks as one region.
enum class Recomputed { no, inside, blocks, across_groups };
/// What is not trained: nothing, a part of every group, or all of one group.
enum class Frozen { no, biases, whole_group };

struct NetOptions {
  Tied tied = Tied::no;
  /// No dimension divides by 2 or 3, and one parameter has a single row.
  bool uneven = false;
  Recomputed recomputed = Recomputed::no;
  Frozen frozen = Frozen::no;
};

/// x + out(gelu(in(norm(x)))).
struct Block final : nn::Layer<Block> {
  nn::LayerNorm norm;
  nn::Linear in, out;
  bool recompute_inside;

  Block(std::int64_t width, std::int64_t inner, bool recompute_inside);
  Tensor forward(const Tensor& x) const;
  void visit(auto&& on) {
    on("norm", norm);
    on("in", in);
    on("out", out);
  }
};

struct Net final : nn::Layer<Net> {
  std::int64_t width;
  Recomputed recomputed;
  nn::Linear embed;
  nn::ModuleList<Block> blocks;
  nn::Linear head;
  nn::Param scale;

  /// The same values for the same options, on every rank.
  explicit Net(const NetOptions& options = {});
  Tensor forward(const Tensor& x);
  void visit(auto&& on) {
    on("embed", embed);
    on("blocks", blocks);
    on("head", head);
    on("scale", scale);
  }
};

/// Every block becomes a group, and what is left another.
void shard_blocks_and_rest(Net& net, const shard::Options& options);

/// One rank's inputs and targets at a step; they do not depend on how many ranks there are.
struct Batch {
  Tensor x, target;
};
Batch batch_of(int rank, int step, std::int64_t width);
/// The mean squared error, in f32 whatever the net computes in.
Tensor loss_of(Net& net, const Batch& batch);

}  // namespace sherd::test
