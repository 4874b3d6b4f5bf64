#include "tests/scenarios/s5_models.h"

#include <algorithm>

#include "shard/fully_shard.h"
#include "shard/summon.h"

namespace sherd::scenarios {
namespace {

using Entries = std::vector<FlatEntry>;

void append(Entries& entries, std::string_view name, std::int64_t numel) {
  const std::int64_t at = entries.empty() ? 0 : entries.back().at + entries.back().numel;
  entries.push_back({std::string(name), numel, at});
}

void append_attention(Entries& entries, const std::string& name) {
  append(entries, name + ".in_proj_weight", 768);
  append(entries, name + ".in_proj_bias", 48);
  append(entries, name + ".out_proj.weight", 256);
  append(entries, name + ".out_proj.bias", 16);
}

/// What follows the attentions of a layer.
void append_rest(Entries& entries, int norms) {
  append(entries, "linear1.weight", 128);
  append(entries, "linear1.bias", 8);
  append(entries, "linear2.weight", 128);
  append(entries, "linear2.bias", 16);
  for (int i = 1; i <= norms; ++i) {
    append(entries, fmt::format("norm{}.weight", i), 16);
    append(entries, fmt::format("norm{}.bias", i), 16);
  }
}

}  // namespace

Tensor loss_of(const Tokens& tokens, const Tensor& logits) {
  return cross_entropy(view(logits, {-1, 23}), view(tokens.tgt, {-1}), {.reduction = Reduction::sum});
}

TransformerWithSharedParams make_transformer(Device device) {
  manual_seed(0);
  TransformerWithSharedParams model;
  model.to(device);
  return model;
}

shard::AutoWrap wrap_layers() {
  return shard::wrap_classes({"TransformerEncoderLayer", "TransformerDecoderLayer"});
}

TwoLinears::TwoLinears(nn::Bias first_bias)
    : lin1((manual_seed(42), 5), 5, {.bias = first_bias, .tensor = {f32, compute}}),
      lin2(5, 7, {.tensor = {f32, compute}}) {}

Tensor input_of_linears() { return to(randn({2, 5}), compute); }

void check_layout(Rank& rank, nn::Module& sharded, ShardingStrategy strategy,
                  const std::vector<FlatUnit>& units) {
  if (strategy == ShardingStrategy::no_shard || rank.world() != 2) return;
  const std::vector<shard::GroupReport> groups = shard::groups_of(sharded);
  rank.check.eq(groups.size(), units.size(), "units");
  const std::vector<nn::NamedParameter> parameters = sharded.named_parameters();
  for (std::size_t u = 0; u < units.size(); ++u) {
    const auto& [label, numel, entries] = units[u];
    rank.check.eq(groups[u].label, label, "unit");
    rank.check.eq(groups[u].gathered_numel, numel, label + ": elements");
    rank.check.eq(groups[u].shard_numel, numel / 2, label + ": elements of a shard");
    rank.check.eq(groups[u].parameters.size(), entries.size(), label + ": parameters");
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const FlatEntry& entry = entries[i];
      const std::string name = label.empty() ? entry.name : label + "." + entry.name;
      rank.check.eq(groups[u].parameters[i].name, entry.name, "name in a unit");
      for (const int r : {0, 1}) {
        const std::int64_t shard_at = r * numel / 2;
        const std::int64_t begin = std::max(entry.at, shard_at);
        const std::int64_t end = std::min(entry.at + entry.numel, shard_at + numel / 2);
        const std::int64_t owned = std::max<std::int64_t>(end - begin, 0);
        rank.check.eq(groups[u].parameters[i].owned_numels[static_cast<std::size_t>(r)], owned,
                      name + ": elements of a rank");
        if (r != rank.index()) continue;
        const auto found = std::ranges::find(parameters, name, &nn::NamedParameter::name);
        test::expect(found != parameters.end(), "'{}' is not listed", name);
        const Tensor local = found->parameter.local();
        rank.check.eq(local.shape(), {owned}, name + ": this rank's part");
        if (owned > 0) rank.check.eq(local.layout().offset, begin - shard_at, name + ": place in the shard");
      }
    }
  }
}

std::vector<FlatUnit> transformer_units() {
  Entries encoder, decoder;
  append_attention(encoder, "self_attn");
  append_rest(encoder, 2);
  append_attention(decoder, "self_attn");
  append_attention(decoder, "multihead_attn");
  append_rest(decoder, 3);
  return {{"",
           462,
           {{"embed_tokens.weight", 368, 0},
            {"transformer.encoder.norm.weight", 16, 368},
            {"transformer.encoder.norm.bias", 16, 384},
            {"transformer.decoder.norm.weight", 16, 400},
            {"transformer.decoder.norm.bias", 16, 416},
            {"output_proj.bias", 23, 432},
            {"bn.weight", 2, 456},
            {"bn.bias", 2, 460}}},
          {"transformer.encoder.layers.0", 1432, encoder},
          {"transformer.encoder.layers.1", 1432, encoder},
          {"transformer.decoder.layers.0", 2552, decoder},
          {"transformer.decoder.layers.1", 2552, decoder}};
}

void check_parameters(Rank& rank, nn::Module& reference, nn::Module& sharded) {
  const shard::SummonFullParams whole_reference(reference), whole(sharded);
  const std::vector<nn::NamedParameter> expected = reference.named_parameters();
  const std::vector<nn::NamedParameter> actual = sharded.named_parameters();
  rank.check.eq(actual.size(), expected.size(), "parameters");
  for (std::size_t i = 0; i < expected.size(); ++i) {
    rank.check.eq(actual[i].name, expected[i].name, "name");
    rank.check.same(actual[i].parameter.data(), expected[i].parameter.data(), expected[i].name);
  }
}

}  // namespace sherd::scenarios
