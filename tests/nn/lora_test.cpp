// Adapters: what PEFT computes with them, in all the ways that a model is run and kept. The folders in
// tests/golden/lora are made by make_lora.py.
#include "nn/lora.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "collectives/world.h"
#include "nn/compile.h"
#include "nn/optimizer.h"
#include "nn/pretrained.h"
#include "nn/state_file.h"
#include "nn/transformer.h"
#include "runtime/io/file_system.h"
#include "shard/checkpoint.h"
#include "shard/fully_shard.h"
#include "shard/sharded_state.h"
#include "shard/summon.h"
#include "tests/message_of.h"
#include "tests/ranks.h"
#include "tests/runtime/harness.h"
#include "tests/source_root.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;
using nlohmann::json;
using Path = FileSystem::Path;

namespace {

const Path goldens = Path(source_root) / "tests/golden";
Path base_of(const char* name) {
  return goldens / "hugging_face" / (std::string_view(name) == "gpt2" ? "gpt2" : "llama_linear");
}
Path adapters_of(const char* name) { return goldens / "lora" / name; }

/// Calls `body` with each golden's name and its frozen model.
void each_golden(auto&& body) {
  for (const char* name : {"llama", "all", "gpt2"}) {
    INFO(name);
    if (std::string_view(name) == "gpt2")
      body(name, load_gpt(base_of(name), f32));
    else
      body(name, load_llama(base_of(name), f32));
  }
}

/// What PEFT calls a parameter of a model here.
std::string peft_name(std::string own) {
  for (const auto& [from, to] : {std::pair("blocks.", "transformer.h."), std::pair(".qkv.", ".attn.c_attn."),
                                 std::pair(".down.", ".mlp.c_proj.")})
    if (const std::size_t at = own.find(from); at != std::string::npos)
      own.replace(at, std::string_view(from).size(), to);
  return own;
}

Tensor loss_of(const Tensor& logits, const Tensor& tokens) {
  const std::int64_t t = tokens.size(1);
  return cross_entropy(reshape(narrow(logits, 1, 0, t - 1), {-1, logits.size(2)}),
                       reshape(narrow(tokens, 1, 1, t - 1), {-1}));
}

double relative(const Tensor& a, const Tensor& b) {
  return distance(a.detach(), b) / std::max(1.0, amax(abs(b)).item());
}

std::string text_of(const Path& file) { return posix_file_system().read(file); }

/// A folder of adapters whose config has other values for some keys.
void write_changed(const Path& to, const Path& from, const json& changes) {
  std::filesystem::create_directories(to);
  std::filesystem::copy_file(from / "adapter_model.safetensors", to / "adapter_model.safetensors",
                             std::filesystem::copy_options::overwrite_existing);
  json config = json::parse(text_of(from / "adapter_config.json"));
  for (const auto& [key, value] : changes.items()) config[key] = value;
  if (posix_file_system().exists(to / "adapter_config.json"))
    posix_file_system().remove(to / "adapter_config.json");
  posix_file_system().create(to / "adapter_config.json")->write(config.dump());
}

LlamaOptions small_options(DType dtype = f32) {
  LlamaOptions options;
  options.vocab_size = 32, options.hidden_size = 16, options.intermediate_size = 24;
  options.num_hidden_layers = 2, options.num_attention_heads = 2;
  options.tensor.dtype = dtype;
  return options;
}
Llama small_llama(DType dtype = f32) {
  manual_seed(3);
  return Llama(small_options(dtype));
}
Tensor some_tokens(std::int64_t rows = 2) {
  manual_seed(4);
  return randint(0, 32, {rows, 6});
}

/// Away from zero, so that adapters have an effect.
void randomise(Module& model) {
  const NoGrad guard;
  manual_seed(5);
  for (const Parameter& p : lora_parameters(model))
    copy_(p.local().detach(), to(randn(p.shape(), {}), p.dtype()));
}

std::map<std::string, Tensor> values_of(const Module& model) {
  std::map<std::string, Tensor> values;
  for (const auto& [name, tensor] : model.state_dict()) values.emplace(name, clone(tensor));
  return values;
}

/// Linear layers as they are called with more than an input.
struct Net final : Layer<Net> {
  Linear a{4, 8}, b{8, 4};
  Tensor forward(const Tensor& x) const { return b(a(x, Activation::gelu), x); }
  void visit(auto&& on) {
    on("a", a);
    on("b", b);
  }
};

}  // namespace

TEST_CASE("lora: adapters of a folder compute, learn and merge as PEFT's do") {
  each_golden([](const char* name, auto model) {
    const StateDict expected = load_state(adapters_of(name) / "expected.safetensors");
    const Tensor tokens = expected.at("tokens");
    load_lora(model, adapters_of(name));
    model.eval();
    const Tensor logits = model(tokens);
    CHECK(relative(logits, expected.at("logits")) < 1e-5);
    loss_of(logits, tokens).backward();
    const std::vector<Parameter> trained = lora_parameters(model);
    Sgd sgd(trained, {.lr = 0.1});
    std::size_t compared = 0;
    for (const auto& [own, parameter] : model.named_parameters()) {
      if (!parameter.requires_grad()) continue;
      CHECK(relative(parameter.grad(), expected.at("grad.base_model.model." + peft_name(own))) < 1e-5);
      ++compared;
    }
    CHECK(compared == trained.size());
    CHECK(compared == expected.size() - 4);
    sgd.step();
    CHECK(relative(model(tokens), expected.at("stepped")) < 1e-5);
    merge_lora(model);
    CHECK(lora_parameters(model).empty());
    CHECK(relative(model(tokens), expected.at("merged")) < 1e-5);
  });
}

TEST_CASE("lora: a saved folder has PEFT's names, bytes and config") {
  each_golden([](const char* name, auto model) {
    const TempDirectory root;
    load_lora(model, adapters_of(name));
    save_lora(model, root / "mine", {.base_model = "gpt2"});
    const StateDict ours = load_state(root / "mine" / "adapter_model.safetensors"),
                    theirs = load_state(adapters_of(name) / "adapter_model.safetensors");
    CHECK(ours.size() == theirs.size());
    for (const auto& [key, values] : theirs) CHECK(same_bits(ours.at(key), values));
    const json own = json::parse(text_of(root / "mine" / "adapter_config.json")),
               peft = json::parse(text_of(adapters_of(name) / "adapter_config.json"));
    for (const auto& [key, value] : own.items()) {
      INFO(key);
      REQUIRE(peft.contains(key));
      if (key != "target_modules" && key != "base_model_name_or_path") CHECK(value == peft.at(key));
    }
    CHECK(own.at("base_model_name_or_path") == "gpt2");
    auto again = [&] {
      if constexpr (std::is_same_v<decltype(model), Gpt>)
        return load_gpt(base_of(name), f32);
      else
        return load_llama(base_of(name), f32);
    }();
    load_lora(again, root / "mine");
    const Tensor tokens = load_state(adapters_of(name) / "expected.safetensors").at("tokens");
    CHECK(same_bits(again(tokens).detach(), model(tokens).detach()));
    save_lora(again, root / "mine");  // in place of the older one
  });
}

TEST_CASE("lora: adapters of every rank, target and dtype start as nothing, learn alone and merge") {
  const Tensor tokens = some_tokens();
  for (const DType base : {f32, bf16, f16, f64})
    for (const std::optional<DType> dtype : {std::optional<DType>(), std::optional(f32), std::optional(bf16)})
      for (const std::int64_t rank : {1, 4, 32})
        for (const LoraScaling scaling : {LoraScaling::by_rank, LoraScaling::by_root_of_rank})
          for (const std::vector<std::string>& targets :
               {std::vector<std::string>{"q_proj", "v_proj"}, {"all-linear"}, {"layers.1.mlp.down_proj"}}) {
            INFO(base << " rank " << rank << " target " << targets[0]);
            Llama model = small_llama(base);
            const Tensor before = model(tokens).detach();
            const auto frozen = values_of(model);
            const std::vector<std::string> names = add_lora(
                model, {.rank = rank, .alpha = 3, .scaling = scaling, .targets = targets, .dtype = dtype});
            CHECK(names.size() == (targets.size() == 2 ? 4U : targets[0] == "all-linear" ? 14U : 1U));
            CHECK(same_bits(model(tokens).detach(), before));
            for (const Parameter& p : lora_parameters(model))
              CHECK(p.dtype() == dtype.value_or(base == f64 ? f64 : f32));
            AdamW adam(model.parameters(), {.lr = 0.05});
            for (int i = 0; i < 2; ++i) {
              loss_of(to(model(tokens), f32), tokens).backward();
              adam.step();
              adam.zero_grad();
            }
            for (const auto& [name, values] : values_of(model)) {
              if (frozen.contains(name))
                CHECK(same_bits(values, frozen.at(name)));
              else
                CHECK(amax(abs(values)).item() > 0);
            }
            const Tensor learned = model(tokens).detach();
            CHECK(learned.dtype() == base);
            CHECK(distance(learned, before) > 1e-3);
            merge_lora(model);
            const double near = base == bf16 || dtype == bf16 ? 0.05 : base == f16 ? 0.01 : 1e-5;
            CHECK(distance(model(tokens).detach(), learned) < near);
            CHECK(values_of(model).size() == frozen.size());
          }
}

TEST_CASE("lora: every class of model takes adapters, with residuals and activations") {
  manual_seed(1);
  Net net;
  add_lora(net, {.rank = 2, .alpha = 4, .targets = {"all-linear"}});
  randomise(net);
  const Tensor x = randn({3, 4}, {});
  const auto by_hand = [](const Linear& l, const Tensor& x) {
    const Tensor delta =
        matmul(matmul(x, transpose(l.lora->lora_A.weight, 0, 1)), transpose(l.lora->lora_B.weight, 0, 1));
    return add(linear(x, l.weight, l.bias), mul(delta, 2));
  };
  CHECK(distance(net(x).detach(), add(x, by_hand(net.b, gelu(by_hand(net.a, x)))).detach()) < 1e-5);
  Net copy = net.clone();
  CHECK(same_bits(copy(x).detach(), net(x).detach()));
  remove_lora(copy);
  CHECK(lora_parameters(net).size() == 4);
  Net moved = std::move(net);
  CHECK(lora_parameters(moved).size() == 4);
  TransformerEncoderLayer layer({.width = 8, .heads = 2, .feedforward = 16});
  CHECK(add_lora(layer, {.targets = {"out_proj", "linear1"}}) ==
        std::vector<std::string>{"self_attn.out_proj", "linear1"});
  Linear alone(3, 2);
  CHECK(add_lora(alone, {.targets = {"all-linear"}}) == std::vector<std::string>{""});
}

TEST_CASE("lora: dropout in training alone") {
  Llama model = small_llama();
  add_lora(model, {.dropout = 0.5, .targets = {"q_proj"}});
  randomise(model);
  const Tensor tokens = some_tokens();
  CHECK(!same_bits(model(tokens).detach(), model(tokens).detach()));
  model.eval();
  CHECK(same_bits(model(tokens).detach(), model(tokens).detach()));
}

TEST_CASE("lora: a compiled model is the eager one, and follows adapters that come and go") {
  const Tensor tokens = some_tokens();
  Llama eager = small_llama(), compiled = small_llama();
  nn::compile(compiled);
  const auto step = [&](Llama& model) {
    const Tensor logits = model(tokens);
    if (logits.requires_grad()) loss_of(logits, tokens).backward();
    return logits.detach();
  };
  const auto same_now = [&] {
    for (int i = 0; i < 3; ++i) CHECK(distance(step(compiled), step(eager)) < 1e-6);
  };
  same_now();
  for (Llama* model : {&eager, &compiled}) {
    manual_seed(7);
    add_lora(*model, {.rank = 3, .targets = {"all-linear"}});
    randomise(*model);
  }
  same_now();
  const std::vector<Parameter> a = lora_parameters(eager), b = lora_parameters(compiled);
  for (std::size_t i = 0; i < a.size(); ++i) CHECK(distance(a[i].grad(), b[i].grad()) < 1e-5);
  merge_lora(eager), merge_lora(compiled);
  same_now();
}

TEST_CASE("lora: a sharded model over a base of another dtype is the whole one, and steps adapters alone") {
  const Tensor tokens = some_tokens(4);
  const LoraOptions options{.rank = 3, .alpha = 6, .targets = {"q_proj", "v_proj", "down_proj"}};
  const auto made = [&] {
    Llama model = small_llama(bf16);
    manual_seed(7);
    add_lora(model, options);
    randomise(model);
    return model;
  };
  Llama whole = made();
  const auto train = [](Llama& model, const Tensor& mine) {
    Sgd sgd(lora_parameters(model), {.lr = 0.1});
    const Tensor loss = loss_of(to(model(mine), f32), mine);
    loss.backward();
    sgd.step();
    return loss.item();
  };
  const auto before = values_of(whole);
  const double loss = train(whole, tokens);
  const auto after = values_of(whole);
  for (const int ranks : {1, 2, 3}) {
    const TempDirectory root;
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      Llama model = made();
      for (LlamaBlock& block : model.model.layers) shard::fully_shard(block);
      shard::fully_shard(model);
      // Every rank has all rows, so that means of means are means.
      const double mine = train(model, tokens);
      expect(std::abs(mine - loss) < 1e-5, "loss {}, of the whole model {}", mine, loss);
      for (const auto& [name, values] : shard::full_state_dict(model)) {
        const bool adapter = name.find("lora_") != std::string::npos;
        expect(values.dtype() == (adapter ? f32 : bf16), "{} is {}", name, values.dtype());
        if (adapter)
          expect(distance(values, after.at(name)) < 1e-4 && distance(values, before.at(name)) > 0,
                 "{} is {} off", name, distance(values, after.at(name)));
        else
          expect(same_bits(values, before.at(name)), "{} has changed", name);
      }
      shard::save_checkpoint(model, root / "checkpoint", world.group());
      const shard::SummonFullParams shown = shard::summon_full_params(model);
      if (world.rank() == 0) save_lora(model, root / "adapters");
    }));
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      Llama model = made();
      shard::fully_shard(model);
      shard::load_checkpoint(model, root / "checkpoint", world.group());
      for (const auto& [name, values] : shard::full_state_dict(model))
        expect(distance(values, after.at(name)) < 1e-4, "{} is another in the checkpoint", name);
    }));
    Llama alone = small_llama(bf16);
    load_lora(alone, root / "adapters");
    CHECK(distance(alone(tokens).detach(), whole(tokens).detach()) < 0.05);
    CHECK_NOTHROW(run_ranks(ranks, [&](World&) {
      Llama model = made();
      shard::fully_shard(model);
      load_lora(model, root / "adapters");
      for (const auto& [name, values] : shard::full_state_dict(model))
        expect(same_bits(values, alone.state_dict().at(name)), "{} is another", name);
      expect(message_of<StateError>([&] { merge_lora(model); }).find("is sharded") != std::string::npos,
             "merged");
      Llama flat = made();
      const std::string why =
          message_of<Error>([&] { shard::fully_shard(flat, {.layout = shard::GroupLayout::flat}); });
      expect(why.find("dtype") != std::string::npos, "the flat layout says: {}", why);
      Llama late = small_llama(bf16);
      shard::fully_shard(late);
      expect(message_of<StateError>([&] { add_lora(late, options); }).find("before fully_shard") !=
                 std::string::npos,
             "added to a sharded model");
    }));
  }
}

TEST_CASE("lora: what cannot be is refused, and nothing has changed") {
  Llama model = small_llama();
  const auto names = [&] { return values_of(model).size(); };
  const std::size_t bare = names();
  const auto refuses = [&](const LoraOptions& options, const char* why) {
    CHECK_THROWS_WITH(add_lora(model, options), ContainsSubstring(why));
    CHECK(names() == bare);
    CHECK(model.lm_head.weight.requires_grad());
  };
  refuses({}, "no targets; name Linear layers");
  refuses({.rank = 0, .targets = {"q_proj"}}, "rank 0 must be above 0");
  refuses({.dropout = 1, .targets = {"q_proj"}}, "dropout 1 must be");
  refuses({.alpha = std::nan(""), .targets = {"q_proj"}}, "finite");
  refuses({.targets = {"q_proj"}, .dtype = i64}, "is not floating");
  refuses({.targets = {"q_proj", "query"}}, "is named 'query'; there are: down_proj, gate_proj, k_proj");
  refuses({.targets = {"proj"}}, "is named 'proj'");
  CHECK_THROWS_WITH(merge_lora(model), ContainsSubstring("has no adapters; add_lora"));
  CHECK_THROWS_WITH(remove_lora(model), ContainsSubstring("has no adapters"));
  const TempDirectory root;
  CHECK_THROWS_WITH(save_lora(model, root / "x"), ContainsSubstring("has no adapters"));
  add_lora(model, {.targets = {"q_proj"}});
  CHECK_THROWS_WITH(add_lora(model, {.targets = {"q_proj"}}), ContainsSubstring("has an adapter"));
  CHECK_THROWS_WITH(save_pretrained(model, root / "x"), ContainsSubstring("save_lora, or merge"));
  add_lora(model, {.rank = 3, .targets = {"v_proj"}});
  CHECK_THROWS_WITH(save_lora(model, root / "x"), ContainsSubstring("differ in rank"));

  LlamaOptions tied = small_options();
  tied.tie_word_embeddings = true;
  Llama llama(tied);
  add_lora(llama, {.targets = {"lm_head", "q_proj"}});
  CHECK_THROWS_WITH(merge_lora(llama), ContainsSubstring("would change too; untie it"));
  CHECK(lora_parameters(llama).size() == 6);
}

TEST_CASE("lora: a folder that says something else is refused by the key") {
  const TempDirectory root;
  const auto refuses = [&](const json& changes, const char* why) {
    INFO(changes.dump());
    write_changed(root / "changed", adapters_of("llama"), changes);
    Llama model = load_llama(base_of("llama"), f32);
    CHECK_THROWS_WITH(load_lora(model, root / "changed"), ContainsSubstring(why));
    CHECK(lora_parameters(model).empty());
    CHECK(model.lm_head.weight.requires_grad());
  };
  refuses({{"peft_type", "IA3"}}, "peft_type is \"IA3\"");
  refuses({{"use_dora", true}}, "use_dora is true; supported: false");
  refuses({{"bias", "all"}}, "bias is \"all\"");
  refuses({{"rank_pattern", {{"q_proj", 8}}}}, "rank_pattern");
  refuses({{"modules_to_save", {"lm_head"}}}, "modules_to_save");
  refuses({{"init_lora_weights", "pissa"}}, "init_lora_weights is \"pissa\"");
  refuses({{"layers_to_transform", {0}}}, "layers_to_transform");
  refuses({{"new_scaling", 2}}, "new_scaling is not a key that is known");
  refuses({{"target_modules", ".*q_proj"}}, "target_modules");
  refuses({{"target_modules", {"query"}}}, "name no Linear");
  refuses({{"target_modules", {"q_proj"}}}, "is no adapter's that target_modules name");
  refuses({{"target_modules", {"q_proj", "v_proj", "o_proj"}}}, "lacks");
  refuses({{"r", 5}}, "the model takes floats of shape [5, 16]");
  refuses({{"r", 0}}, "r is 0");
  refuses({{"lora_dropout", 1}}, "lora_dropout");

  Llama other = load_llama(base_of("llama"), f32);
  add_lora(other, {.rank = 2, .targets = {"q_proj", "v_proj"}});
  CHECK_THROWS_WITH(load_lora(other, adapters_of("llama")), ContainsSubstring("the model has others"));
  std::filesystem::create_directory(root / "full");
  posix_file_system().create(root / "full" / "notes")->write("mine");
  CHECK_THROWS_WITH(save_lora(other, root / "full"), ContainsSubstring("holds 'notes'"));
}
