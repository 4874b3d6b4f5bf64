#include "tests/shard/nets.h"

namespace sherd::test {

Block::Block(std::int64_t width, std::int64_t inner, bool recompute_inside)
    : norm(width), in(width, inner), out(inner, width), recompute_inside(recompute_inside) {}

Tensor Block::forward(const Tensor& x) const {
  const auto wide = [&] { return gelu(in(norm(x))); };
  return add(x, out(recompute_inside ? recompute(wide) : wide()));
}

namespace {

std::int64_t seeded(std::int64_t width) {
  manual_seed(7);
  return width;
}

void freeze(Net& net, Frozen frozen) {
  if (frozen == Frozen::whole_group) net.blocks[1].set_requires_grad(false);
  if (frozen != Frozen::biases) return;
  for (nn::NamedParameter& p : net.named_parameters())
    if (p.name.ends_with("bias")) p.parameter.set_requires_grad(false);
}

}  // namespace

Net::Net(const NetOptions& options)
    : width(seeded(options.uneven ? 5 : 12)),
      recomputed(options.recomputed),
      embed(width, width),
      head(width, width),
      scale(rand({options.uneven ? 1 : width}, {}, 0.5, 1.5)) {
  for (int i = 0; i < 3; ++i)
    blocks.emplace_back(width, options.uneven ? 7 : 24, recomputed == Recomputed::inside);
  if (options.tied == Tied::within_group) nn::tie(embed.weight, head.weight);
  if (options.tied == Tied::across_groups) {
    nn::tie(blocks[0].in.weight, blocks[2].in.weight);
    nn::tie(blocks[1].out.bias, head.bias);
  }
  freeze(*this, options.frozen);
}

Tensor Net::forward(const Tensor& x) {
  Tensor y = embed(x);
  if (recomputed == Recomputed::across_groups) {
    y = blocks[0](y);
    y = recompute([&] { return blocks[2](blocks[1](y)); });
  } else {
    for (Block& block : blocks)
      y = recomputed == Recomputed::blocks ? recompute([&] { return block(y); }) : block(y);
  }
  return mul(head(y), scale);
}

void shard_blocks_and_rest(Net& net, const shard::Options& options) {
  for (Block& block : net.blocks) shard::fully_shard(block, options);
  shard::fully_shard(net, options);
}

Batch batch_of(int rank, int step, std::int64_t width) {
  manual_seed(static_cast<std::uint64_t>(1000 * step + rank));
  const Tensor x = randn({3, width});
  return {x, randn({3, width})};
}

Tensor loss_of(Net& net, const Batch& batch) {
  const Tensor y = to(net(batch.x), DType::f32);
  return mean(square(sub(y, to(batch.target, y.device()))));
}

}  // namespace sherd::test
