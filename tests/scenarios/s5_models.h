// The models of S5, the references that they are held against, and what S5 compares.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "nn/optimizer.h"
#include "shard/data_parallel.h"
#include "shard/fsdp.h"
#include "tests/scenarios/models.h"

namespace sherd::scenarios {

using shard::ShardingStrategy;

/// A grid of this axis alone.
inline auto strategies(std::vector<ShardingStrategy> list) {
  return Grid(Axis<ShardingStrategy>{"sharding_strategy", std::move(list)});
}

/// A Transformer over tokens, whose output projection has the embedding's weight. In evaluation mode, so that
/// nothing in a forward is drawn or kept.
struct TransformerWithSharedParams final : nn::Layer<TransformerWithSharedParams> {
  nn::Embedding embed_tokens{23, 16};
  nn::Transformer transformer{
      {.width = 16, .encoder_layers = 2, .decoder_layers = 2, .feedforward = 8, .dropout = 0.1}};
  nn::Linear output_proj{16, 23};
  nn::Buffer vocab_bias{ones({16})};
  nn::Buffer long_buffer{zeros({16}, {i64})};
  nn::BatchNorm1d bn{2};

  TransformerWithSharedParams() {
    nn::tie(embed_tokens.weight, output_proj.weight);
    eval();
  }
  /// src (6, 2) and tgt (4, 2) to logits (4, 2, 23).
  Tensor forward(const Tensor& src_ids, const Tensor& tgt_ids) const {
    const Tensor embedded = embed_tokens(src_ids);
    const Tensor src = embedded + vocab_bias + sherd::to(long_buffer.tensor(), embedded.dtype());
    return output_proj(transformer(src, bn(embed_tokens(tgt_ids))));
  }
  void visit(auto&& on) {
    on("embed_tokens", embed_tokens);
    on("transformer", transformer);
    on("output_proj", output_proj);
    on("vocab_bias", vocab_bias);
    on("long_buffer", long_buffer);
    on("bn", bn);
  }
};

/// Source and target tokens; every rank has the same.
struct Tokens {
  Tensor src = view(arange(0, 12, 1, {i64, compute}), {6, 2}),
         tgt = view(arange(0, 8, 1, {i64, compute}), {4, 2});
};
Tensor loss_of(const Tokens& tokens, const Tensor& logits);

/// The same values on every rank, on `device`.
TransformerWithSharedParams make_transformer(Device device);
/// Encoder and decoder layers become units, and what is left another.
shard::AutoWrap wrap_layers();

/// Two linear layers with a ReLU in between, on the compute device from the start.
struct TwoLinears final : nn::Layer<TwoLinears> {
  nn::Linear lin1, lin2;

  explicit TwoLinears(nn::Bias first_bias = nn::Bias::yes);
  Tensor forward(const Tensor& x) const { return lin2(relu(lin1(x))); }
  void visit(auto&& on) {
    on("lin1", lin1);
    on("lin2", lin2);
  }
};
/// (2, 5): the next numbers of the rank's generator, which the model has seeded alike on every rank.
Tensor input_of_linears();

/// A model whose gradients are averaged whole.
template <class M>
struct Replicas {
  M model;
  shard::DataParallel averaging;
  Replicas(const Rank& rank, M made) : model(std::move(made)), averaging(model, rank.group()) {}
};

/// A parameter of a unit's flat parameter: so many elements from there on.
struct FlatEntry {
  std::string name;
  std::int64_t numel, at;
};
/// What the catalogue says of one unit's flat parameter, padding included.
struct FlatUnit {
  std::string label;
  std::int64_t numel;
  std::vector<FlatEntry> entries;
};
/// Where this rank's part of each parameter lies in its shard, and what each rank has of it. Without shards
/// (NO_SHARD), and in worlds that the catalogue has no numbers for, nothing.
void check_layout(Rank& rank, nn::Module& sharded, ShardingStrategy strategy,
                  const std::vector<FlatUnit>& units);
/// The layout of `TransformerWithSharedParams` under `wrap_layers`.
std::vector<FlatUnit> transformer_units();

/// Summons both. Names and values of a sharded module are those of `reference`, sharded or not, to the bit.
void check_parameters(Rank& rank, nn::Module& reference, nn::Module& sharded);

}  // namespace sherd::scenarios
