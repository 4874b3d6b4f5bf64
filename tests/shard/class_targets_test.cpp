// Losses that a head takes by chunks of its logits, of sharded models.
#include "autograd/autograd.h"
#include "nn/gpt.h"
#include "shard/fully_shard.h"
#include "tests/ranks.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

nn::Gpt small_gpt(bool tied) {
  manual_seed(3);
  return nn::Gpt(
      {.layers = 2, .heads = 2, .width = 8, .context = 8, .vocab = 11, .tie_word_embeddings = tied});
}

}  // namespace

TEST_CASE("a sharded model gives the loss of its targets, and the gradients, that a whole one does") {
  for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
    for (const bool tied : {true, false})
      CHECK_NOTHROW(run_ranks(2, [&](World& world) {
        const Tensor tokens = Tensor::from<std::int64_t>({3, 1, 4, 1, 5, 9, 2, 6, 5, 3}, {2, 5});
        const nn::ClassTargets targets{Tensor::from<std::int64_t>({1, 4, 1, 5, -100, 2, 6, 5, 3, 7}, {2, 5}),
                                       {.label_smoothing = 0.1, .chunk = 3}};
        nn::Gpt whole = small_gpt(tied), net = small_gpt(tied);
        for (nn::GptBlock& block : net.blocks)
          shard::fully_shard(block, {.mesh = world.mesh(), .layout = layout});
        if (!tied) shard::fully_shard(net.head, {.mesh = world.mesh(), .layout = layout});
        shard::fully_shard(net, {.mesh = world.mesh(), .layout = layout});
        for (int step = 0; step < 2; ++step) {
          whole.zero_grad();
          net.zero_grad();
          const Tensor loss = net(tokens, targets), wanted = whole(tokens, targets);
          expect(distance(loss.detach(), wanted.detach()) < 1e-6, "loss {}", loss.item());
          wanted.backward();
          loss.backward();
          const auto all = whole.named_parameters();
          const auto parts = net.named_parameters();
          for (std::size_t i = 0; i < all.size(); ++i)
            expect(distance(shard::gather_whole(parts[i].parameter, parts[i].parameter.grad()),
                            all[i].parameter.grad()) < 1e-5,
                   "the gradient of {}", all[i].name);
        }
      }));
}
