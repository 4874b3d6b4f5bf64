// S5.10 to S5.14: several forwards before a backward, and what parameters show in between.
#include "runtime/ops.h"
#include "shard/fully_shard.h"
#include "tests/scenarios/s5_models.h"

namespace sherd::scenarios {
namespace {

using shard::FullyShardedDataParallel;

// ---- S5.10 to S5.13 ----

/// A sharded transformer with its optimizer.
struct Wrapped {
  TransformerWithSharedParams model = make_transformer(compute);
  FullyShardedDataParallel handle;
  nn::Adam optim;

  Wrapped(const Rank& rank, ShardingStrategy strategy, bool offload, bool use_orig_params)
      : handle(model, {.mesh = rank.mesh,
                       .strategy = strategy,
                       .auto_wrap = wrap_layers(),
                       .device = offload ? std::optional(compute) : std::nullopt,
                       .cpu_offload = offload,
                       .use_orig_params = use_orig_params}),
        optim(model.parameters(), {.lr = 1e-2, .foreach = false}) {}
  Tensor operator()(const Tokens& tokens) const { return model(tokens.src, tokens.tgt); }
};

/// One flat parameter a unit, and the original ones.
struct FlatAndOriginal {
  Wrapped flat, original;
  FlatAndOriginal(Rank& rank, ShardingStrategy strategy, bool offload)
      : flat(rank, strategy, offload, false), original(rank, strategy, offload, true) {
    rank.check.eq(flat.model.parameters().size(), 5u, "flat parameters");
    const bool sharded = strategy != ShardingStrategy::no_shard;
    rank.check.eq(flat.handle.flat_param().local().numel(), sharded ? 230 : 459,
                  "elements of the root's flat shard");
    check_layout(rank, original.model, strategy, transformer_units());
    for (const Wrapped* w : {&flat, &original})
      for (const nn::Parameter& p : w->model.parameters())
        rank.check.eq(p.local().device(), offload ? host : compute, "device of a parameter");
  }
};

auto multiple_forward(bool offload) {
  return [offload](Rank& rank, ShardingStrategy strategy) {
    FlatAndOriginal both(rank, strategy, offload);
    for (int i = 0; i < 3; ++i) {
      const Tokens first;
      const Tokens second{first.src + 1, first.tgt + 1};
      std::vector<std::array<Tensor, 3>> results;
      for (Wrapped* w : {&both.flat, &both.original}) {
        w->optim.zero_grad();
        const Tensor one = (*w)(first), two = (*w)(second), loss = sum(one + two);
        loss.backward();
        w->optim.step();
        results.push_back({one, two, loss});
      }
      for (const std::size_t k : {0, 1, 2}) rank.check.same(results[1][k], results[0][k], "result");
    }
    check_parameters(rank, both.flat.model, both.original.model);
  };
}

auto summon_between_two_forwards(bool offload) {
  return [offload](Rank& rank, ShardingStrategy strategy) {
    FlatAndOriginal both(rank, strategy, offload);
    Wrapped &flat = both.flat, &original = both.original;
    for (int i = 0; i < 3; ++i) {
      flat.optim.zero_grad();
      original.optim.zero_grad();
      const Tokens tokens;
      const Tensor flat1 = flat(tokens), original1 = original(tokens);
      rank.check.same(original1, flat1, "first output");
      check_parameters(rank, flat.model, original.model);
      const Tensor flat2 = flat(tokens), original2 = original(tokens);
      rank.check.same(original2, flat2, "second output");
      sum(flat1 + flat2).backward();
      sum(original1 + original2).backward();
      flat.optim.step();
      original.optim.step();
    }
    check_parameters(rank, flat.model, original.model);
  };
}

// ---- S5.14 ----

void access_params_after_forward(Rank& rank, ShardingStrategy strategy) {
  Replicas<TwoLinears> replicas(rank, TwoLinears(nn::Bias::no));
  TwoLinears model(nn::Bias::no);
  const FullyShardedDataParallel wrapped(
      model,
      {.mesh = rank.mesh, .strategy = strategy, .auto_wrap = shard::wrap_always(), .use_orig_params = true});
  check_layout(rank, model, strategy,
               {{"lin1", 26, {{"weight", 25, 0}}}, {"lin2", 44, {{"weight", 35, 0}, {"bias", 7, 36}}}});
  nn::Adam reference_optim(replicas.model.parameters(), {.lr = 1e-2}),
      optim(model.parameters(), {.lr = 1e-2});

  // By parameter and rank: the elements of the whole one that are shown where it is sharded.
  using Range = std::pair<std::int64_t, std::int64_t>;
  const std::array<std::array<Range, 2>, 3> ranges = {
      {{{{0, 13}, {13, 25}}}, {{{0, 22}, {22, 35}}}, {{{0, 0}, {0, 7}}}}};
  const auto check_views = [&](bool whole, std::string_view when) {
    const std::vector<nn::NamedParameter> expected = replicas.model.named_parameters();
    const std::vector<nn::NamedParameter> actual = model.named_parameters();
    rank.check.eq(actual.size(), 3u, "parameters");
    for (std::size_t i = 0; i < expected.size(); ++i) {
      rank.check.eq(actual[i].name, expected[i].name, "name");
      const Tensor full = expected[i].parameter.data();
      const auto [begin, end] = ranges[i][static_cast<std::size_t>(rank.index())];
      rank.check.close(actual[i].parameter.data(),
                       whole ? full : narrow(flatten(full), 0, begin, end - begin),
                       fmt::format("{} {}", expected[i].name, when));
    }
  };
  const auto forward_both = [&] {
    const Tensor x = input_of_linears();
    return std::array{replicas.model(x), model(x)};
  };
  const bool always = strategy == ShardingStrategy::no_shard;
  const bool after_forward = always || strategy == ShardingStrategy::shard_grad_op;
  const std::array outputs = forward_both();
  check_views(after_forward, "after a forward");
  for (const Tensor& output : outputs) sum(output).backward();
  reference_optim.step();
  optim.step();
  check_views(always, "after a step");
  forward_both();
  check_views(after_forward, "after another forward");
}

}  // namespace

std::vector<Scenario> s5_forwards() {
  using enum ShardingStrategy;
  const Grid parity = strategies({no_shard, shard_grad_op, full_shard});
  std::vector<Scenario> list;
  const auto add = [&](std::string id, std::string test, auto grid, auto body) {
    list.push_back(scenario(std::move(id), std::move(test), Harness::processes, {2}, grid, body));
  };
  add("S5.10", "test_multiple_forward [offload false]", parity, multiple_forward(false));
  add("S5.11", "test_multiple_forward [offload true]", parity, multiple_forward(true));
  add("S5.12", "test_summon_between_two_forwards [offload false]", parity,
      summon_between_two_forwards(false));
  add("S5.13", "test_summon_between_two_forwards [offload true]", parity, summon_between_two_forwards(true));
  add("S5.14", "test_access_params_after_forward", strategies({no_shard, full_shard, shard_grad_op}),
      access_params_after_forward);
  return list;
}

}  // namespace sherd::scenarios
