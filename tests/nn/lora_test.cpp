// Adapters: what PEFT computes with them, in all the ways that a model is run and kept. The folders in
// tests/golden/lora are made by make_lora.py.
#include "nn/lora.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

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

TEST_CASE("lora: ranks and alphas by layer are saved as PEFT's patterns, and loaded from them") {
  each_golden([](const char* name, const auto& base) {
    const TempDirectory root;
    const auto has = [&](const std::vector<LoraOptions>& options) {
      auto model = base.clone();
      for (const LoraOptions& o : options) add_lora(model, o);
      const NoGrad guard;
      for (Parameter& p : lora_parameters(model)) copy_(p.data(), rand(p.shape(), {}, -1, 1));
      return model;
    };
    const bool is_gpt = std::is_same_v<std::remove_cvref_t<decltype(base)>, Gpt>;
    const std::string first = is_gpt ? "blocks.0.qkv" : "model.layers.0.self_attn.q_proj",
                      second = is_gpt ? "blocks.1.qkv" : "model.layers.1.self_attn.q_proj",
                      others = is_gpt ? "up" : "down_proj";
    auto model = has({{.rank = 3, .alpha = 6, .targets = {others}},
                      {.rank = 5, .alpha = 6, .targets = {first}},
                      {.rank = 3, .alpha = 2.5, .targets = {second}}});
    save_lora(model, root / "mine");
    const json config = json::parse(text_of(root / "mine" / "adapter_config.json"));
    CHECK(config.at("r") == 3);
    CHECK(config.at("lora_alpha") == 6);
    const std::string layers = is_gpt ? "transformer.h." : "model.layers.",
                      member = is_gpt ? ".attn.c_attn" : ".self_attn.q_proj";
    CHECK(config.at("rank_pattern") == json({{layers + "0" + member, 5}}));
    CHECK(config.at("alpha_pattern") == json({{layers + "1" + member, 2.5}}));
    const Tensor tokens = load_state(adapters_of(name) / "expected.safetensors").at("tokens");
    const auto loads = [&](const std::filesystem::path& folder) {
      auto again = base.clone();
      load_lora(again, folder);
      again.eval(), model.eval();
      CHECK(same_bits(again(tokens).detach(), model(tokens).detach()));
      load_lora(again, folder);  // into adapters that are there
      CHECK(same_bits(again(tokens).detach(), model(tokens).detach()));
    };
    loads(root / "mine");
    // The same in other words: the ends of names, and defaults that no layer has.
    write_changed(
        root / "ends", root / "mine",
        {{"r", 7},
         {"rank_pattern", {{"0" + member, 5}, {"1" + member, 3}, {is_gpt ? "c_fc" : "down_proj", 3}}},
         {"alpha_pattern", {{"h.9" + member, 4}, {"1" + member, 2.5}}}});
    loads(root / "ends");
    auto unlike = has({{.rank = 3, .alpha = 6, .targets = {others, first, second}}});
    CHECK_THROWS_WITH(load_lora(unlike, root / "mine"), ContainsSubstring("the model has others"));
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

namespace {

const LoraOptions sharded_options{.rank = 3, .alpha = 6, .targets = {"q_proj", "v_proj", "down_proj"}};

Llama adapted_llama(DType base) {
  Llama model = small_llama(base);
  manual_seed(7);
  add_lora(model, sharded_options);
  randomise(model);
  return model;
}

/// One step of SGD; the loss before it.
double train(Llama& model, const Tensor& tokens) {
  Sgd sgd(lora_parameters(model), {.lr = 0.1});
  const Tensor loss = loss_of(to(model(tokens), f32), tokens);
  loss.backward();
  sgd.step();
  return loss.item();
}

void shard_blocks(Llama& model, shard::GroupLayout layout = shard::GroupLayout::per_parameter) {
  for (LlamaBlock& block : model.model.layers) shard::fully_shard(block, {.layout = layout});
  shard::fully_shard(model, {.layout = layout});
}

/// Throws unless the frozen values are those of before and the adapters' those of after.
void expect_stepped(const StateDict& state, const std::map<std::string, Tensor>& before,
                    const std::map<std::string, Tensor>& after) {
  for (const auto& [name, values] : state) {
    const double off = distance(values, after.at(name));
    if (name.find("lora_") == std::string::npos)
      expect(same_bits(values, before.at(name)), "{} has changed", name);
    else
      expect(values.dtype() == f32 && off < 1e-4 && distance(values, before.at(name)) > 0, "{} is {} off",
             name, off);
  }
}

}  // namespace

TEST_CASE(
    "lora: a sharded model is the whole one, over a base of another dtype too, and steps adapters alone") {
  const Tensor tokens = some_tokens(4);
  for (const DType base : {bf16, f32})
    for (const auto layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat}) {
      if (base == bf16 && layout == shard::GroupLayout::flat) continue;  // of one dtype
      Llama whole = adapted_llama(base);
      const auto before = values_of(whole);
      const double loss = train(whole, tokens);
      const auto after = values_of(whole);
      for (const int ranks : {1, 2, 4}) {
        INFO(base << ", " << ranks << " ranks, layout " << static_cast<int>(layout));
        const TempDirectory root;
        std::vector<double> losses(static_cast<std::size_t>(ranks));
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          Llama model = adapted_llama(base);
          shard_blocks(model, layout);
          const std::int64_t rows = 4 / ranks;
          losses[static_cast<std::size_t>(world.rank())] =
              train(model, narrow(tokens, 0, world.rank() * rows, rows));
          expect_stepped(shard::full_state_dict(model), before, after);
          shard::save_checkpoint(model, root / "checkpoint", world.group());
          const shard::SummonFullParams shown = shard::summon_full_params(model);
          if (world.rank() == 0) save_lora(model, root / "adapters");
        }));
        CHECK(std::abs(std::accumulate(losses.begin(), losses.end(), 0.0) / ranks - loss) < 1e-5);
        Llama alone = small_llama(base);
        load_lora(alone, root / "adapters");
        CHECK(distance(alone(tokens).detach(), whole(tokens).detach()) < (base == bf16 ? 0.05 : 1e-4));
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          Llama model = adapted_llama(base), adapters = adapted_llama(base);
          shard_blocks(model, layout), shard_blocks(adapters, layout);
          shard::load_checkpoint(model, root / "checkpoint", world.group());
          expect_stepped(shard::full_state_dict(model), before, after);
          load_lora(adapters, root / "adapters");
          expect_stepped(shard::full_state_dict(adapters), before, after);
        }));
      }
    }
}

TEST_CASE("lora: what is sharded takes no adapters and gives none back") {
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    const auto refuses = [](auto&& act, std::string_view why) {
      const std::string said = message_of<Error>(act);
      expect(said.find(why) != std::string::npos, "in place of '{}': {}", why, said);
    };
    Llama model = adapted_llama(bf16), late = small_llama(bf16), flat = adapted_llama(bf16);
    shard::fully_shard(model);
    refuses([&] { merge_lora(model); }, "is sharded; save_lora within shard::summon_full_params");
    refuses([&] { remove_lora(model); }, "is sharded");
    refuses([&] { save_lora(model, "never"); }, "is sharded, here is a part");
    shard::fully_shard(late);
    refuses([&] { add_lora(late, sharded_options); }, "add adapters before fully_shard");
    refuses([&] { shard::fully_shard(flat, {.layout = shard::GroupLayout::flat}); }, "dtype");
  }));
}

TEST_CASE("lora: adapters of a model on meta get values with it") {
  LlamaOptions options = small_options();
  options.tensor.device = Device::meta();
  Llama model(options);
  add_lora(model, {.targets = {"q_proj"}});
  CHECK_THROWS_WITH(load_pretrained(model, base_of("llama")), ContainsSubstring("tensors are"));
  std::vector<std::string> asked;
  model.materialize(Device::cpu(), [&](const std::string& name, const Tensor& whole) {
    asked.push_back(name);
    fill_(whole, 0.5);
  });
  CHECK(std::ranges::count(asked, "model.layers.1.self_attn.q_proj.lora_B.weight") == 1);
  CHECK(model(some_tokens()).detach().numel() > 0);
  Llama adapted(llama_options(base_of("llama")));
  add_lora(adapted, {.targets = {"q_proj"}});
  randomise(adapted);
  const auto before = values_of(adapted);
  CHECK(load_pretrained(adapted, base_of("llama")).complete());  // the frozen weights alone
  for (const auto& [name, values] : values_of(adapted))
    CHECK(same_bits(values, before.at(name)) == (name.find("lora_") != std::string::npos));
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
  add_lora(model, {.dropout = 0.5, .targets = {"v_proj"}});
  CHECK_THROWS_WITH(save_lora(model, root / "x"), ContainsSubstring("differ in what a folder has one of"));

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
  refuses({{"rank_pattern", {{"q_proj", 8}}}}, "the model takes floats of shape [8, 16]");
  refuses({{"rank_pattern", {{"q_proj", 0}}}}, "rank_pattern': q_proj is 0");
  refuses({{"rank_pattern", {{"q_proj", nullptr}}}}, "rank_pattern': q_proj is missing");
  refuses({{"rank_pattern", {8}}}, "rank_pattern is [8]; supported: an object");
  refuses({{"rank_pattern", {{"^.*q_proj", 8}}}}, "supported: names of layers");
  refuses({{"alpha_pattern", {{"q_proj", -1}}}}, "alpha_pattern': q_proj is -1");
  refuses({{"alpha_pattern", {{"q_proj", 1}, {"self_attn.q_proj", 2}}}}, "one of them is meant");
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

namespace {

struct Inner final : Layer<Inner> {
  Linear proj{4, 3};
  Tensor forward(const Tensor& x) const { return proj(x); }
  void visit(auto&& on) { on("proj", proj); }
};
/// Of two layers the name of one ends that of the other; two more are alike.
struct Nested final : Layer<Nested> {
  Linear proj{5, 4};
  Inner block;
  Linear up{3, 4}, down{4, 3};
  Tensor forward(const Tensor& x) const { return down(up(block(proj(x)))); }
  void visit(auto&& on) {
    on("proj", proj);
    on("block", block);
    on("up", up);
    on("down", down);
  }
};

/// `outer` and `inner` are ranks of the two.
Nested nested(std::int64_t outer, std::int64_t inner) {
  manual_seed(5);
  Nested net;
  add_lora(net, {.rank = outer, .targets = {"proj"}});
  net.block.proj.lora.reset();
  add_lora(net, {.rank = inner, .targets = {"block.proj"}});
  add_lora(net, {.rank = 2, .targets = {"up", "down"}});
  const NoGrad guard;
  for (Parameter& p : lora_parameters(net)) copy_(p.data(), rand(p.shape(), {}, -1, 1));
  return net;
}

}  // namespace

TEST_CASE("lora: of layers whose names end alike a folder brings each its own, or is not written") {
  const TempDirectory root;
  const Tensor x = ones({2, 5});
  const Nested net = nested(2, 3);
  save_lora(net, root / "mine");
  manual_seed(5);
  Nested other;
  load_lora(other, root / "mine");
  CHECK(same_bits(other(x).detach(), net(x).detach()));
  // The pattern of the outer layer would name the inner one too.
  CHECK_THAT(message_of<StateError>([&] { save_lora(nested(4, 3), root / "other"); }),
             ContainsSubstring("of which one is the end of the other"));
  CHECK_FALSE(std::filesystem::exists(root / "other"));
}
