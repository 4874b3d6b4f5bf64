// S2: flat parameters of a world of one rank: what they contain, and that wrapping changes no number.
#include <array>
#include <optional>

#include "nn/optimizer.h"
#include "runtime/ops.h"
#include "shard/flat_param_handle.h"
#include "shard/fsdp.h"
#include "tests/scenarios/models.h"

namespace sherd::scenarios {
namespace {

using shard::FlatParamHandle;
using shard::FlatShardEntry;
using shard::FullyShardedDataParallel;

enum class Weights { own, shared };

/// Shared: each decoder layer takes the two feed-forward weights, not the biases, of its encoder layer.
Seq2Seq make_transformer(bool half, Weights weights = Weights::own) {
  manual_seed(0);
  Seq2Seq model;
  if (weights == Weights::shared)
    for (std::size_t i = 0; i < 2; ++i) {
      nn::TransformerEncoderLayer& encoder = model.encoder.layers[i];
      nn::TransformerDecoderLayer& decoder = model.decoder.layers[i];
      nn::tie(encoder.linear1.weight, decoder.linear1.weight);
      nn::tie(encoder.linear2.weight, decoder.linear2.weight);
    }
  if (half) model.to(f16);
  return model;
}

shard::FsdpOptions defaults(const Rank& rank) { return {.mesh = rank.mesh, .device = compute}; }

void check_dtypes(Rank& rank, const nn::Module& module, DType dtype) {
  for (const nn::NamedParameter& p : module.named_parameters())
    rank.check.eq(p.parameter.local().dtype(), dtype, p.name);
}

// ---- S2.1 ----

void partial_flattening(Rank& rank, bool half) {
  Seq2Seq model = make_transformer(half);
  auto& encoders = model.encoder.layers;
  auto& decoders = model.decoder.layers;
  rank.check.eq(model.parameter_count(), 59520, "elements before");
  rank.check.eq(encoders[1].parameters().size(), 12u, "parameters of an encoder layer");
  rank.check.eq(decoders[0].parameters().size(), 18u, "parameters of a decoder layer");

  // No device: the model stays where it is, until somebody moves it.
  const FullyShardedDataParallel one(encoders[1], {.mesh = rank.mesh});
  const FullyShardedDataParallel two(decoders[0], {.mesh = rank.mesh});
  const std::vector<nn::Parameter> flat = {one.flat_param(), two.flat_param()};
  rank.check.eq(flat[0].numel() + flat[1].numel(), 29696, "flattened elements");
  rank.check.eq(model.parameter_count(), 59520, "elements after");
  rank.check.eq(encoders[1].parameters().size(), 1u, "parameters of the flattened encoder layer");
  rank.check.eq(decoders[0].parameters().size(), 1u, "parameters of the flattened decoder layer");
  rank.check.eq(encoders[0].parameters().size(), 12u, "parameters of the other encoder layer");
  rank.check.eq(decoders[1].parameters().size(), 18u, "parameters of the other decoder layer");

  for (const DType dtype : half ? std::array{f16, f32} : std::array{f32, f16}) {
    model.to(dtype);
    rank.check.eq(one.flat_param() == flat[0] && two.flat_param() == flat[1], true, "the same objects");
    for (const nn::Parameter& p : flat) rank.check.eq(p.local().dtype(), dtype, "flat parameter");
    check_dtypes(rank, encoders[0], dtype);
  }
}

// ---- S2.2 to S2.5 ----

void flatten_nothing(Rank& rank, bool half) {
  const Seq2Seq model = make_transformer(half);
  std::string error = "none";
  try {
    FlatParamHandle({}, model);
  } catch (const ValueError& thrown) {
    error = thrown.what();
  }
  rank.check.contains(error, "Cannot construct a FlatParamHandle with an empty parameter list", "error");
}

struct PlusOne final : nn::Layer<PlusOne> {
  Tensor forward(const Tensor& x) const { return x + 1; }
  void visit(auto&&) {}
};

void empty_module(Rank& rank) {
  manual_seed(0);
  PlusOne module;
  const Tensor in = rand({1});
  const Tensor expected = module(in);
  const FullyShardedDataParallel wrapped(module, defaults(rank));
  rank.check.eq(module.parameters().size(), 0u, "parameters");
  rank.check.eq(wrapped.flat_param().defined(), false, "a flat parameter");
  const Tensor out = module(in);
  rank.check.eq(out, expected, "output");
  rank.check.eq(out.device(), compute, "device of the output");
}

void check_numel(Rank& rank, const Seq2Seq& model, std::int64_t numel) {
  std::int64_t sum = 0;
  for (const nn::Parameter& p : model.parameters()) sum += p.numel();
  const FlatParamHandle handle(model.parameters(), model);
  rank.check.eq(sum, numel, "elements of the parameters");
  rank.check.eq(handle.numel(), numel, "elements of the flat parameter");
  rank.check.eq(handle.flat().numel(), numel, "elements of the flat tensor");
  rank.check.eq(handle.dtype(), model.parameters()[0].local().dtype(), "dtype");
}
void numel_without_shared_params(Rank& rank, bool half) { check_numel(rank, make_transformer(half), 59520); }
void numel_with_shared_params(Rank& rank, bool half) {
  check_numel(rank, make_transformer(half, Weights::shared), 43136);
}

// ---- S2.6 to S2.8 ----

void check_output(Rank& rank, Seq2Seq model) {
  model.to(compute);
  const Tensor expected = model.output();
  rank.check.eq(expected.shape(), {10, 8, 32}, "shape of the output");
  const FullyShardedDataParallel wrapped(model, defaults(rank));
  rank.check.close(model.output(), expected, "output");
}
void output_without_shared_params(Rank& rank, bool half) { check_output(rank, make_transformer(half)); }
void output_with_shared_params(Rank& rank, bool half) {
  check_output(rank, make_transformer(half, Weights::shared));
}

/// Norm of the parameters' norms, in their own dtype.
Tensor norm_of(const nn::Module& module) {
  const NoGrad guard;
  std::vector<Tensor> norms;
  for (const nn::Parameter& p : module.parameters()) {
    const std::array<Tensor, 1> values = {p.local()};
    norms.push_back(to(order_free_norm(values), p.local().dtype()));
  }
  return to(order_free_norm(norms), norms[0].dtype());
}

Tensor norm_after_step(const Seq2Seq& model) {
  nn::Sgd optim(model.parameters(), {.lr = 0.01});
  sum(model.output()).backward();
  optim.step();
  return norm_of(model);
}

void pnorm_after_step_with_shared_params(Rank& rank, bool half) {
  Seq2Seq plain = make_transformer(half, Weights::shared);
  plain.to(compute);
  const Tensor before = norm_of(plain), expected = norm_after_step(plain);
  rank.check.eq(before.item() == expected.item(), false, "the step left the norm as it was");

  Seq2Seq model = make_transformer(half, Weights::shared);
  model.to(compute);
  const FullyShardedDataParallel wrapped(model, defaults(rank));
  rank.check.eq(model.parameters().size(), 1u, "parameters");
  rank.check.close(norm_after_step(model), expected, "norm after a step");
}

// ---- S2.9 and S2.10 ----

/// The shards of two simulated ranks.
struct Aligned {
  std::array<std::pair<int, int>, 3> layers;  ///< inputs and outputs
  std::optional<DType> param_dtype;
  std::int64_t numel;
  std::array<std::pair<std::int64_t, std::int64_t>, 2> bounds;
  std::array<std::vector<FlatShardEntry>, 2> shards;
};

Aligned full_precision() {
  return {{{{3, 7}, {7, 5}, {5, 5}}},
          std::nullopt,
          85,
          {{{0, 42}, {43, 85}}},
          {{{{"0.weight", {7, 3}, 21, 0, 20, 0}, {"1.weight", {5, 7}, 35, 0, 18, 24}},
            {{"1.weight", {5, 7}, 35, 19, 34, 0}, {"2.weight", {5, 5}, 25, 0, 24, 17}}}}};
}
Aligned mixed_precision() {
  return {{{{2, 5}, {5, 5}, {5, 3}}},
          f16,
          63,
          {{{0, 31}, {32, 63}}},
          {{{{"0.weight", {5, 2}, 10, 0, 9, 0}, {"1.weight", {5, 5}, 25, 0, 15, 16}},
            {{"1.weight", {5, 5}, 25, 16, 24, 0}, {"2.weight", {3, 5}, 15, 0, 14, 16}}}}};
}

void shard_metadata(Rank& rank, const Aligned& c, int simulated) {
  nn::Sequential model;
  for (const auto& [in, out] : c.layers) model.append(nn::Linear(in, out, {nn::Bias::no}));
  const FlatParamHandle handle(model.parameters(), model,
                               {.param_dtype = c.param_dtype, .use_orig_params = true});
  rank.check.eq(handle.numel(), c.numel, "elements with padding");
  rank.check.eq(handle.dtype(), f32, "stored dtype");

  const auto at = static_cast<std::size_t>(simulated);
  const auto [start, end] = c.bounds[at];
  const std::vector<FlatShardEntry> entries = handle.shard_metadata(start, end);
  rank.check.eq(entries.size(), c.shards[at].size(), "parameters in the shard");
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const FlatShardEntry &entry = entries[i], &expected = c.shards[at][i];
    rank.check.eq(entry.name, expected.name, "name");
    rank.check.eq(entry.shape, expected.shape, "shape");
    rank.check.eq(entry.numel, expected.numel, "elements");
    rank.check.eq(entry.first, expected.first, "first element in the shard");
    rank.check.eq(entry.last, expected.last, "last element in the shard");
    rank.check.eq(entry.in_shard, expected.in_shard, "place in the shard");
  }
}
void metadata_full_precision(Rank& rank, int simulated) { shard_metadata(rank, full_precision(), simulated); }
void metadata_mixed_precision(Rank& rank, int simulated) {
  shard_metadata(rank, mixed_precision(), simulated);
}

}  // namespace

std::vector<Scenario> s2() {
  const Grid half(Axis<bool>{"half", {false, true}});
  const Grid simulated(Axis<int>{"simulated rank", {0, 1}});
  std::vector<Scenario> list;
  const auto add = [&](std::string id, std::string test, auto grid, auto body) {
    list.push_back(scenario(std::move(id), std::move(test), Harness::processes, {1}, grid, body));
  };
  add("S2.1", "test_partial_flattening", half, partial_flattening);
  add("S2.2", "test_flatten_nothing", half, flatten_nothing);
  add("S2.3", "test_empty_module", Grid<>(), empty_module);
  add("S2.4", "test_numel_without_shared_params", half, numel_without_shared_params);
  add("S2.5", "test_numel_with_shared_params", half, numel_with_shared_params);
  add("S2.6", "test_output_without_shared_params", half, output_without_shared_params);
  add("S2.7", "test_output_with_shared_params", half, output_with_shared_params);
  add("S2.8", "test_pnorm_after_step_with_shared_params", half, pnorm_after_step_with_shared_params);
  add("S2.9", "test_flat_param_shard_metadata_aligned_full_precision", simulated, metadata_full_precision);
  add("S2.10", "test_flat_param_shard_metadata_aligned_mixed_precision", simulated, metadata_mixed_precision);
  return list;
}

}  // namespace sherd::scenarios
