// S4.1: hooks of sharding in and out of programs. S4.2: its state in one. S4.4 to S4.9: training steps by
// programs of every executor, beside the same ones eagerly. Losses are equal to the bit, which is more than the catalogue's
// tolerance.
#include "nn/compile.h"
#include "nn/optimizer.h"
#include "runtime/ops.h"
#include "shard/fully_shard.h"
#include "tests/scenarios/models.h"
#include "tests/scenarios/scenario.h"

namespace sherd::scenarios {
namespace {

constexpr std::int64_t vocabulary = 8, longest = 16, width = 16, heads = 4;
constexpr double dropped = 0.1;

struct Attention final : nn::Layer<Attention> {
  nn::Linear wq{width, width, {.bias = nn::Bias::no}}, wk{width, width, {.bias = nn::Bias::no}},
      wv{width, width, {.bias = nn::Bias::no}}, wo{width, width, {.bias = nn::Bias::no}};
  nn::Dropout dropout{dropped};
  Tensor forward(const Tensor& x) const {
    const auto split = [&](const Tensor& y) {
      return transpose(view(y, {x.shape()[0], x.shape()[1], heads, width / heads}), 1, 2);
    };
    const Tensor mixed = attention(split(wq(x)), split(wk(x)), split(wv(x)),
                                   {.causal = true, .dropout = training() ? dropped : 0});
    return dropout(wo(reshape(transpose(mixed, 1, 2), x.shape())));
  }
  void visit(auto&& on) {
    on("wq", wq);
    on("wk", wk);
    on("wv", wv);
    on("wo", wo);
    on("dropout", dropout);
  }
};

struct FeedForward final : nn::Layer<FeedForward> {
  nn::Linear in{width, 4 * width}, out{4 * width, width};
  nn::Dropout dropout{dropped};
  Tensor forward(const Tensor& x) const { return dropout(out(gelu(in(x)))); }
  void visit(auto&& on) {
    on("in", in);
    on("out", out);
    on("dropout", dropout);
  }
};

struct Block final : nn::Layer<Block> {
  nn::LayerNorm attention_norm{width}, feed_forward_norm{width};
  Attention attention;
  FeedForward feed_forward;
  Tensor forward(const Tensor& x) const {
    const Tensor h = x + attention(attention_norm(x));
    return h + feed_forward(feed_forward_norm(h));
  }
  void visit(auto&& on) {
    on("attention_norm", attention_norm);
    on("attention", attention);
    on("ffn_norm", feed_forward_norm);
    on("feed_forward", feed_forward);
  }
};

/// Tokens (N, L) to logits (N, L, vocabulary); the output has the embedding's weight.
struct Transformer final : nn::Layer<Transformer> {
  nn::Embedding tok_embeddings{vocabulary, width}, pos_embeddings{longest, width};
  nn::Dropout dropout{dropped};
  nn::ModuleList<Block> layers;
  nn::LayerNorm norm{width};
  nn::Linear output{width, vocabulary, {.bias = nn::Bias::no}};

  Transformer() {
    for (int i = 0; i < 2; ++i) layers.emplace_back();
    nn::tie(tok_embeddings.weight, output.weight);
  }
  Tensor forward(const Tensor& tokens) const {
    const Tensor places = arange(0, static_cast<double>(tokens.shape()[1]), 1, {i64, tokens.device()});
    Tensor h = dropout(tok_embeddings(tokens) + pos_embeddings(places));
    for (const Block& layer : layers) h = layer(h);
    return sherd::to(output(norm(h)), f32);
  }
  void visit(auto&& on) {
    on("tok_embeddings", tok_embeddings);
    on("pos_embeddings", pos_embeddings);
    on("dropout", dropout);
    on("layers", layers);
    on("norm", norm);
    on("output", output);
  }
};

/// `make(rank)` gives a sharded model, of other values on each rank, `input(rank)` what each step trains on.
template <class Make, class Input>
std::vector<Tensor> losses(const Rank& rank, std::optional<Executor> executor, const Make& make,
                           const Input& input, CompileStats& stats, std::string& text) {
  const std::unique_ptr<nn::Module> held = make(rank);
  auto& model = static_cast<typename decltype(make(rank))::element_type&>(*held);
  nn::Sgd optim(model.parameters(), {.lr = 1e-4});
  std::vector<Tensor> all;
  const auto run = [&](int steps) {
    manual_seed(42);
    for (int i = 0; i < steps; ++i) {
      const Tensor loss = sum(model(input(rank)));
      all.push_back(loss.detach());
      loss.backward();
      optim.step();
      optim.zero_grad();
    }
  };
  run(1);
  if (executor)
    nn::compile(
        model,
        {.executor = *executor, .full_graph = FullGraph::yes, .sharding_hooks = ShardingHooks::inside});
  run(10);
  if (executor) {
    stats = nn::compiled_programs(model).stats();
    text = nn::compiled_programs(model).text();
  }
  return all;
}

template <class Make, class Input>
void compare(Rank& rank, Executor executor, std::span<const std::string> marks, const Make& make,
             const Input& input) {
  CompileStats stats;
  std::string text;
  const std::vector<Tensor> compiled = losses(rank, executor, make, input, stats, text),
                            eager = losses(rank, {}, make, input, stats, text);
  for (std::size_t i = 0; i < eager.size(); ++i)
    rank.check.same(compiled[i], eager[i], fmt::format("loss {}", i));
  rank.check.eq(stats.graphs, 2u, "graphs: one forward and one backward");
  rank.check.eq(stats.hits, 9u, "calls by the program");
  rank.check.eq(stats.eager, 0u, "calls that ran eagerly");
  for (const std::string& mark : marks)
    rank.check.contains(text, mark, "what the sharding does stands in it");
}

void simple_mlp(Rank& rank, Executor executor) {
  const auto make = [](const Rank& of) {
    manual_seed(static_cast<std::uint64_t>(of.index()));
    auto model = std::make_unique<nn::Sequential>(
        nn::Linear(width, width), nn::Relu(), nn::Linear(width, width), nn::Relu(), nn::Linear(width, width));
    shard::fully_shard(*model, {.mesh = of.mesh, .reshard_after_forward = true, .device = compute});
    return model;
  };
  const std::vector<std::string> marks = {"begin root", "end root", "back to end root"};
  compare(rank, executor, marks, make, [](const Rank& of) {
    manual_seed(static_cast<std::uint64_t>(of.index()));
    return randn({2, width}, {f32, compute});
  });
}

/// Besides the catalogue's: what is called by programs has eager's bits, and the backward counts too.
void disable_compiling_hooks(Rank& rank, bool skip_fsdp_hooks) {
  const auto trained = [&](bool by_programs, CompileStats& forward, CompileStats& all) {
    manual_seed(1);
    Mlp model(4);
    shard::fully_shard(model, {.mesh = rank.mesh, .device = compute});
    if (by_programs)
      nn::compile(model, {.sharding_hooks = skip_fsdp_hooks ? ShardingHooks::around : ShardingHooks::inside});
    nn::Sgd optim(model.parameters(), {.lr = 0.1});
    manual_seed(static_cast<std::uint64_t>(rank.index()));
    std::vector<Tensor> losses;
    for (int i = 0; i < 3; ++i) {
      losses.push_back(sum(square(model(randn({4, 4}, {f32, compute})))));
      if (by_programs && i == 0) forward = nn::compiled_programs(model).stats();
      losses.back().backward();
      optim.step();
      optim.zero_grad();
    }
    if (by_programs) all = nn::compiled_programs(model).stats();
    return losses;
  };
  CompileStats forward, all;
  const std::vector<Tensor> eager = trained(false, forward, all), compiled = trained(true, forward, all);
  for (std::size_t i = 0; i < eager.size(); ++i)
    rank.check.same(compiled[i], eager[i], fmt::format("loss {}", i));
  rank.check.eq(forward.sharding_hooks, skip_fsdp_hooks ? 0u : 2u, "hooks that the forward's trace met");
  rank.check.eq(all.sharding_hooks, skip_fsdp_hooks ? 0u : 3u, "and the backward's, to its end");
  rank.check.eq(all.hits, 2u, "calls by the program");
  rank.check.eq(all.eager, 0u, "calls that ran eagerly");
}

/// Has no parameters, and asks what it computes.
struct Stateful final : nn::Layer<Stateful> {
  Tensor forward(const Tensor& x) const {
    return shard::phase_of(*this) == shard::Phase::forward ? x + 1 : x;
  }
  void visit(auto&&) {}
};

/// The state is the sharding's own, which the module's forward sets and restores: in a program nothing of it
/// is left.
void trace_use_training_state(Rank& rank) {
  Stateful module;
  shard::fully_shard(module, {.mesh = rank.mesh, .device = host});
  const Tensor inp = zeros({1}, {f32, host});
  rank.check.eq(shard::phase_of(module) == shard::Phase::idle, true, "idle before");
  const Tensor eager = module(inp);
  rank.check.same(eager, inp + 1, "eager");
  rank.check.eq(shard::phase_of(module) == shard::Phase::idle, true, "idle after the eager call");
  nn::compile(module, {.full_graph = FullGraph::yes});
  for (int i = 0; i < 3; ++i) {
    rank.check.same(module(inp), eager, "compiled");
    rank.check.eq(shard::phase_of(module) == shard::Phase::idle, true, "idle after the compiled call");
  }
  const CompileStats stats = nn::compiled_programs(module).stats();
  rank.check.eq(stats.frames, 1u, "frames");
  rank.check.eq(stats.graphs, 1u, "graphs");
  rank.check.eq(stats.ops.size() == 1 && stats.ops[0] == 1, true, "one op");
  rank.check.eq(stats.hits, 2u, "calls by the program");
}

void transformer(Rank& rank, Executor executor) {
  const auto make = [](const Rank& of) {
    manual_seed(static_cast<std::uint64_t>(of.index()));
    auto model = std::make_unique<Transformer>();
    const shard::Options options{.mesh = of.mesh, .reshard_after_forward = true, .device = compute};
    for (Block& layer : model->layers) shard::fully_shard(layer, options);
    shard::fully_shard(*model, options);
    return model;
  };
  const std::vector<std::string> marks = {"begin layers.0", "end layers.1", "back to end layers.1",
                                          "back to begin layers.1", "back to end layers.0"};
  compare(rank, executor, marks, make, [](const Rank& of) {
    manual_seed(static_cast<std::uint64_t>(of.index()));
    return randint(0, vocabulary, {2, longest}, {i64, compute});
  });
}

}  // namespace

std::vector<Scenario> s4_training() {
  const auto by = [](const std::string& id, const std::string& test, void (*body)(Rank&, Executor),
                     Executor executor) {
    return scenario(id, test, Harness::processes, {2}, Grid<>(), [=](Rank& rank) { body(rank, executor); });
  };
  const std::string mlp = "test_simple_mlp_fullgraph_backend_", whole = "test_transformer_fullgraph_backend_",
                    replay = "aot_eager", partition = "aot_eager_decomp_partition", fused = "inductor";
  return {scenario("S4.1", "test_disable_compiling_hooks", Harness::processes, {2, 4},
                   Grid(Axis<bool>{"skip_fsdp_hooks", {false, true}}), disable_compiling_hooks),
          scenario("S4.2", "test_dynamo_trace_use_training_state", Harness::processes, {2}, Grid<>(),
                   trace_use_training_state),
          by("S4.4", mlp + replay, simple_mlp, Executor::replay),
          by("S4.5", mlp + partition, simple_mlp, Executor::partition),
          by("S4.6", mlp + fused, simple_mlp, Executor::fused),
          by("S4.7", whole + replay, transformer, Executor::replay),
          by("S4.8", whole + partition, transformer, Executor::partition),
          by("S4.9", whole + fused, transformer, Executor::fused)};
}

}  // namespace sherd::scenarios
