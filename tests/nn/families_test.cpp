// The families that Llama's module has: what transformers computes with each, in all the ways that a model is
// run and kept. The folders are made by tests/golden/make_hugging_face.py.
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "collectives/world.h"
#include "nn/compile.h"
#include "nn/generate.h"
#include "nn/optimizer.h"
#include "nn/pretrained.h"
#include "nn/state_file.h"
#include "runtime/io/file_system.h"
#include "shard/fully_shard.h"
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

/// A folder of goldens, and what its config.json says.
struct Golden {
  const char* name;
  LlamaFamily family;
  std::optional<std::int64_t> window{};  // of the last layer but one
  std::optional<RotaryKind> scaling{};
  Path folder() const { return Path(source_root) / "tests/golden/hugging_face" / name; }
  Llama model(DType dtype = f32) const { return load_llama(folder(), dtype); }
  StateDict expected() const { return load_state(folder() / "expected.safetensors"); }
};

const std::vector<Golden> goldens = {
    {"llama_linear", LlamaFamily::llama, {}, RotaryKind::linear},
    {"llama_dynamic", LlamaFamily::llama, {}, RotaryKind::dynamic},
    {"llama_yarn", LlamaFamily::llama, {}, RotaryKind::yarn_fractional},
    {"mistral", LlamaFamily::mistral, 6},
    {"qwen2", LlamaFamily::qwen2, 6},
    {"qwen3", LlamaFamily::qwen3, {}, RotaryKind::yarn},
    {"gemma2", LlamaFamily::gemma2},
    {"gemma3", LlamaFamily::gemma3, 6, RotaryKind::linear},
    {"phi3", LlamaFamily::phi3, 6},
};

/// Calls `body` with each of them.
void each_golden(auto&& body) {
  for (const Golden& golden : goldens) {
    INFO(golden.name);
    body(golden);
  }
}

/// Cross entropy of what follows each token but the last.
Tensor loss_of(const Tensor& logits, const Tensor& tokens) {
  const std::int64_t t = tokens.size(1);
  return cross_entropy(reshape(narrow(logits, 1, 0, t - 1), {-1, logits.size(2)}),
                       reshape(narrow(tokens, 1, 1, t - 1), {-1}));
}

double relative(const Tensor& a, const Tensor& b) {
  return distance(a.detach(), b) / std::max(1.0, amax(abs(b)).item());
}

std::string text_of(const Path& file) { return posix_file_system().read(file); }

/// Names and bytes of a folder.
std::map<std::string, std::string> files_in(const Path& folder) {
  std::map<std::string, std::string> all;
  for (const std::string& name : posix_file_system().list(folder)) all[name] = text_of(folder / name);
  return all;
}

/// By name, in whatever order.
bool same_state(const StateDict& a, const StateDict& b) {
  const std::map<std::string, Tensor> one(a.begin(), a.end()), two(b.begin(), b.end());
  return std::ranges::equal(one, two, [](const auto& x, const auto& y) {
    return x.first == y.first && same_bits(x.second, y.second);
  });
}

}  // namespace

TEST_CASE("families: config.json gives the parts of a family, with the sizes that it names") {
  each_golden([](const Golden& golden) {
    const LlamaOptions o = llama_options(golden.folder());
    CHECK(o.family == golden.family);
    CHECK(o.hidden_size == 16);
    CHECK(o.window_of(o.num_hidden_layers - 2) == golden.window);
    if (golden.scaling) CHECK(o.rope_scaling.kind == *golden.scaling);
    CHECK((o.rope_scaling == RotaryScaling{}) == !golden.scaling);
    const LlamaOptions parts = llama_options(golden.family);
    CHECK(parts.gain == o.gain);
    CHECK(parts.query_key_norms == o.query_key_norms);
  });
}

TEST_CASE("families: logits, loss, gradients, a step and greedy tokens past the window are transformers'") {
  each_golden([](const Golden& golden) {
    Llama model = golden.model();
    const StateDict expected = golden.expected();
    const Tensor tokens = expected.at("tokens"), logits = model(tokens);
    CHECK(distance(logits.detach(), expected.at("logits")) < 1e-5);
    const Tensor loss = loss_of(logits, tokens);
    CHECK(distance(loss.detach(), expected.at("loss")) < 1e-5);
    loss.backward();
    for (const NamedParameter& p : model.named_parameters()) {
      INFO(p.name);
      CHECK(relative(p.parameter.grad(), expected.at("grad." + p.name)) < 1e-5);
    }
    model.eval();
    const auto prompt = narrow(select(tokens, 0, 0), 0, 0, 4).to_vector<std::int64_t>();
    CHECK(generate(model, prompt, {.max_new_tokens = 30, .temperature = 0}) ==
          expected.at("continuation").to_vector<std::int64_t>());
    model.train();
    Sgd(model.parameters(), {.lr = 0.1}).step();
    CHECK(relative(model(tokens), expected.at("stepped")) < 1e-5);
  });
}

TEST_CASE("families: logits from a cache are those of the whole sequence, however it is cut") {
  each_golden([](const Golden& golden) {
    Llama model = golden.model();
    const NoGrad guard;
    const Tensor tokens = golden.expected().at("tokens");
    const LlamaOptions& o = model.options;
    // With `dynamic` scaling a sequence that grows beyond what the model knows changes all of its turns.
    const std::int64_t t = o.rope_scaling.kind == RotaryKind::dynamic ? o.max_position_embeddings : 20;
    const Tensor whole = model(narrow(tokens, 1, 0, t));
    for (const std::vector<std::int64_t>& cut : {std::vector<std::int64_t>(static_cast<std::size_t>(t), 1),
                                                 {1, t - 1},
                                                 {7, 1, 1, t - 9},
                                                 {t - 2, 2}}) {
      KeyValueCache cache;
      std::int64_t at = 0;
      for (const std::int64_t n : cut) {
        CHECK(distance(model(narrow(tokens, 1, at, n), cache), narrow(whole, 1, at, n)) < 1e-5);
        at += n;
      }
      for (std::int64_t layer = 0; layer < o.num_hidden_layers; ++layer) {
        const KeyValues& kept = cache[static_cast<std::size_t>(layer)];
        CHECK(kept.seen() == t);
        if (const auto window = o.window_of(layer)) CHECK(kept.keys().size(2) < *window + cut.back());
      }
    }
  });
}

TEST_CASE("families: a folder that was written is the folder that was read") {
  each_golden([](const Golden& golden) {
    const TempDirectory root;
    const Llama model = load_llama(golden.folder());
    save_pretrained(model, root / "one", {.config_from = golden.folder()});
    save_pretrained(load_llama(root / "one"), root / "two", {.config_from = root / "one"});
    save_pretrained(load_llama(root / "one"), root / "bare");
    CHECK(files_in(root / "one") == files_in(root / "two"));
    CHECK(same_state(load_llama(root / "bare").state_dict(), model.state_dict()));
    CHECK(same_state(load_state(root / "one" / "model.safetensors"),
                     load_state(golden.folder() / "model.safetensors")));
    const Tensor tokens = golden.expected().at("tokens");
    CHECK(same_bits(load_llama(root / "bare")(tokens).detach(), model(tokens).detach()));
    const json config = json::parse(text_of(root / "one" / "config.json"));
    CHECK(config.at("model_type") == json::parse(text_of(golden.folder() / "config.json")).at("model_type"));
    CHECK(config.at("eos_token_id") == 2);
  });
}

TEST_CASE("families: compiled they compute and learn to the bits of eager") {
  each_golden([](const Golden& golden) {
    const auto run = [&](Llama& model) {
      std::vector<Tensor> all;
      Sgd optimizer(model.parameters(), {.lr = 0.1});
      const Tensor tokens = golden.expected().at("tokens");
      for (const std::int64_t t : {20, 20, 9, 20}) {
        const Tensor x = narrow(tokens, 1, 0, t), logits = model(x);
        loss_of(logits, x).backward();
        all.push_back(logits.detach());
        optimizer.step();
        optimizer.zero_grad();
      }
      return all;
    };
    Llama eager = golden.model(), compiled = golden.model();
    nn::compile(compiled);
    const std::vector<Tensor> a = run(eager), b = run(compiled);
    for (std::size_t i = 0; i < a.size(); ++i) CHECK(same_bits(a[i], b[i]));
    nn::uncompile(compiled);
    CHECK(same_state(eager.state_dict(), compiled.state_dict()));
  });
}

TEST_CASE("families: sharded by blocks they train to the bits of one process") {
  each_golden([](const Golden& golden) {
    const Tensor tokens = golden.expected().at("tokens");
    const auto train = [&](Llama& model) {
      AdamW optimizer(model.parameters(), {.lr = 1e-2});
      std::vector<double> losses;
      for (int step = 0; step < 3; ++step) {
        const Tensor loss = loss_of(model(tokens), tokens);
        losses.push_back(loss.item());
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      return losses;
    };
    Llama alone = golden.model();
    const std::vector<double> losses = train(alone);
    CHECK(losses.back() < losses.front());
    for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
      CHECK_NOTHROW(run_ranks(2, [&](World&) {
        LlamaOptions options = llama_options(golden.folder());
        options.tensor.device = Device::meta();
        Llama model(options);
        for (LlamaBlock& block : model.model.layers) shard::fully_shard(block, {.layout = layout});
        shard::fully_shard(model, {.layout = layout});
        load_pretrained(model, golden.folder());
        expect(train(model) == losses, "losses differ");
      }));
  });
}

TEST_CASE("families: in 16 bits they are what they are in 32, to their rounding") {
  each_golden([](const Golden& golden) {
    const Llama wide = golden.model(), narrow_model = golden.model(bf16);
    const NoGrad guard;
    const Tensor tokens = golden.expected().at("tokens"), logits = wide(tokens);
    CHECK(narrow_model(tokens).dtype() == bf16);
    const Tensor error = sub(to(narrow_model(tokens), f32), logits);
    CHECK(std::sqrt(sum(square(error)).item()) < 0.03 * std::sqrt(sum(square(logits)).item()));
  });
}

TEST_CASE("families: options that a family's config.json has no words for are not saved as something else") {
  const auto refused = [](LlamaOptions o, auto&& change, const std::string& word) {
    o.vocab_size = 16, o.hidden_size = 8, o.intermediate_size = 8, o.num_hidden_layers = 2;
    o.num_attention_heads = 2, o.num_key_value_heads = 1, o.head_dim = 4;
    if (o.sliding_window) o.sliding_window = 3;
    const TempDirectory root;
    CHECK_NOTHROW(save_pretrained(Llama(o), root / "before"));
    CHECK(load_llama(root / "before").options.family == o.family);
    change(o);
    const std::string message = message_of<StateError>([&] { save_pretrained(Llama(o), root / "it"); });
    INFO(message);
    CHECK(one_line_about(message, "save_pretrained"));
    CHECK_THAT(message, ContainsSubstring(word) && ContainsSubstring("family"));
    CHECK_FALSE(posix_file_system().exists(root / "it"));
  };
  for (const LlamaFamily family :
       {LlamaFamily::llama, LlamaFamily::mistral, LlamaFamily::qwen2, LlamaFamily::phi3})
    refused(
        llama_options(family), [](LlamaOptions& o) { o.query_key_norms = true; }, "query_key_norms is true");
  const auto of = [](LlamaFamily family) { return llama_options(family); };
  refused(of(LlamaFamily::llama), [](LlamaOptions& o) { o.sliding_window = 3; }, "sliding_window");
  refused(
      of(LlamaFamily::llama), [](LlamaOptions& o) { o.attention_bias = AttentionBias::inputs; },
      "attention_bias");
  refused(
      of(LlamaFamily::llama), [](LlamaOptions& o) { o.partial_rotary_factor = 0.5; },
      "partial_rotary_factor");
  refused(
      of(LlamaFamily::mistral), [](LlamaOptions& o) { o.layer_types = {Reach::all, Reach::window}; },
      "layer_types");
  refused(
      of(LlamaFamily::mistral), [](LlamaOptions& o) { o.projections = Projections::fused; }, "projections");
  refused(
      of(LlamaFamily::qwen2), [](LlamaOptions& o) { o.attention_bias = AttentionBias::none; },
      "attention_bias");
  refused(
      of(LlamaFamily::qwen3), [](LlamaOptions& o) { o.query_pre_attn_scalar = 5; },
      "query_pre_attn_scalar is 5");
  refused(of(LlamaFamily::qwen3), [](LlamaOptions& o) { o.mlp_bias = true; }, "mlp_bias");
  refused(
      of(LlamaFamily::gemma2), [](LlamaOptions& o) { o.rope_local_base_freq = 5; }, "rope_local_base_freq");
  refused(of(LlamaFamily::gemma2), [](LlamaOptions& o) { o.gain = Gain::weight; }, "gain");
  refused(
      of(LlamaFamily::gemma3), [](LlamaOptions& o) { o.attn_logit_softcapping = 5; },
      "attn_logit_softcapping");
  refused(
      of(LlamaFamily::gemma3), [](LlamaOptions& o) { o.embedding_scale = EmbeddingScale::one; },
      "embedding_scale");
  refused(of(LlamaFamily::phi3), [](LlamaOptions& o) { o.norms = NormPlaces::before_and_behind; }, "norms");
  refused(
      of(LlamaFamily::phi3),
      [](LlamaOptions& o) { o.rope_scaling = {.factor = 2, .kind = RotaryKind::linear}; }, "rope_scaling");
}

TEST_CASE("families: config.json of older and newer versions says the same") {
  const TempDirectory root;
  const auto read = [&](const json& config) {
    if (posix_file_system().exists(root / "config.json")) posix_file_system().remove(root / "config.json");
    posix_file_system().create(root / "config.json")->write(config.dump());
    return llama_options(root.path());
  };
  const auto of = [](const char* type, json more) {
    more["model_type"] = type;
    more["num_hidden_layers"] = more.value("num_hidden_layers", 4);
    return more;
  };
  // What is not there has the family's default, and null says that there is none.
  CHECK(read(of("mistral", {})).sliding_window == 4096);
  CHECK_FALSE(read(of("mistral", {{"sliding_window", nullptr}})).sliding_window.has_value());
  CHECK(read(of("mistral", {{"num_key_value_heads", nullptr}})).key_value_heads() == 32);
  CHECK(read(of("gemma2", {})).final_logit_softcapping == 30);
  CHECK_FALSE(read(of("gemma2", {{"final_logit_softcapping", nullptr}})).final_logit_softcapping.has_value());
  CHECK(read(of("gemma2", {{"hidden_act", "gelu"}})).hidden_act == Gate::gelu_tanh);
  CHECK(read(of("gemma2", {{"sliding_window_size", 4096}})).window_of(0) == 4096);
  CHECK_FALSE(read(of("gemma2", {})).window_of(1).has_value());
  CHECK(read(of("phi3", {{"partial_rotary_factor", 0.5}})).rotary_width() == 48);
  // Windows of Qwen are off unless they are asked for.
  CHECK_FALSE(read(of("qwen2", {{"sliding_window", 8}, {"max_window_layers", 0}})).window_of(3).has_value());
  const LlamaOptions qwen =
      read(of("qwen3", {{"use_sliding_window", true}, {"sliding_window", 8}, {"max_window_layers", 3}}));
  CHECK_FALSE(qwen.window_of(2).has_value());
  CHECK(qwen.window_of(3) == 8);
  // Gemma 3, as it is on the Hub and as transformers writes it now.
  const LlamaOptions old =
      read(of("gemma3_text", {{"sliding_window_pattern", 2},
                              {"sliding_window", 8},
                              {"rope_theta", 500.0},
                              {"rope_local_base_freq", 20.0},
                              {"rope_scaling", {{"rope_type", "linear"}, {"factor", 8.0}}}}));
  const LlamaOptions now = read(
      of("gemma3_text",
         {{"layer_types", {"sliding_attention", "full_attention", "sliding_attention", "full_attention"}},
          {"sliding_window", 8},
          {"rope_parameters",
           {{"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 500.0}}},
            {"sliding_attention", {{"rope_theta", 20.0}}}}}}));
  for (const LlamaOptions& o : {old, now})
    for (const std::int64_t layer : {0, 1, 2, 3}) {
      const bool local = layer % 2 == 0;
      CHECK(o.window_of(layer) == (local ? std::optional<std::int64_t>(8) : std::nullopt));
      CHECK(o.rotary_of(layer).base == (local ? 20 : 500));
      CHECK(o.rotary_of(layer).scaling ==
            (local ? RotaryScaling{} : RotaryScaling{.factor = 8, .kind = RotaryKind::linear}));
    }
  // Two objects of rotary settings say the same, or none is taken.
  const json linear = {{"rope_type", "linear"}, {"factor", 2.0}}, plain = {{"rope_type", "default"}};
  CHECK(read(of("llama", {{"rope_scaling", linear}, {"rope_parameters", linear}})).rope_scaling.factor == 2);
  CHECK_THAT(message_of<ValueError>(
                 [&] { read(of("llama", {{"rope_scaling", linear}, {"rope_parameters", plain}})); }),
             ContainsSubstring("rope_parameters") && ContainsSubstring("what rope_scaling beside it says"));
  // Yarn without a factor of its own for scores has that of the paper.
  const auto yarn = [&](json more) {
    more.update({{"type", "yarn"}, {"factor", 4.0}});
    return read(of("qwen2", {{"rope_scaling", more}})).rope_scaling;
  };
  CHECK(yarn({}).amplitude == 0.1 * std::log(4.0) + 1);
  CHECK(yarn({}).original == 32768);
  CHECK(yarn({{"attention_factor", 0.5}}).amplitude == 0.5);
  CHECK(yarn({{"mscale", 1.0}, {"mscale_all_dim", 1.0}}).amplitude == 1);
}

TEST_CASE("families: the options of a family are those of a config.json that names nothing else") {
  const TempDirectory root;
  for (const auto& [type, family] : std::map<std::string, LlamaFamily>{{"llama", LlamaFamily::llama},
                                                                       {"mistral", LlamaFamily::mistral},
                                                                       {"qwen2", LlamaFamily::qwen2},
                                                                       {"qwen3", LlamaFamily::qwen3},
                                                                       {"gemma2", LlamaFamily::gemma2},
                                                                       {"gemma3_text", LlamaFamily::gemma3},
                                                                       {"phi3", LlamaFamily::phi3}}) {
    INFO(type);
    if (posix_file_system().exists(root / "config.json")) posix_file_system().remove(root / "config.json");
    posix_file_system().create(root / "config.json")->write(json{{"model_type", type}}.dump());
    const LlamaOptions o = llama_options(family), read = llama_options(root.path());
    CHECK(o.context() == read.context());
    REQUIRE(o.num_hidden_layers == read.num_hidden_layers);
    for (std::int64_t layer = 0; layer < o.num_hidden_layers; ++layer) {
      CHECK(o.window_of(layer) == read.window_of(layer));
      CHECK(o.rotary_of(layer).base == read.rotary_of(layer).base);
    }
  }
}

TEST_CASE("families: scaled positions are as many as the scaling was made for") {
  LlamaOptions o{.vocab_size = 8,
                 .hidden_size = 8,
                 .intermediate_size = 8,
                 .num_hidden_layers = 1,
                 .num_attention_heads = 2,
                 .max_position_embeddings = 10};
  const auto longest = [&](RotaryScaling scaling) {
    o.rope_scaling = scaling;
    const Llama model(o);
    const std::int64_t most = o.context();
    CHECK(model(zeros({1, most}, {i64})).size(1) == most);
    CHECK_THAT(message_of<ShapeError>([&] { model(zeros({1, most + 1}, {i64})); }),
               ContainsSubstring(fmt::format("Llama: {} positions, the model takes {}", most + 1, most)));
    return most;
  };
  CHECK(longest({}) == 10);
  CHECK(longest({.factor = 8, .original = 5, .kind = RotaryKind::llama3}) == 10);
  CHECK(longest({.factor = 3, .kind = RotaryKind::linear}) == 30);
  CHECK(longest({.factor = 2.5, .kind = RotaryKind::dynamic}) == 25);
  for (const RotaryKind yarn : {RotaryKind::yarn, RotaryKind::yarn_fractional}) {
    CHECK(longest({.factor = 4, .original = 10, .kind = yarn}) == 40);
    CHECK(longest({.factor = 2, .original = 4, .kind = yarn}) == 10);
  }
}

TEST_CASE("families: a batch without sequences, and sequences without tokens, have such logits") {
  each_golden([](const Golden& golden) {
    const Llama model = golden.model();
    for (const Shape& shape : {Shape{0, 4}, Shape{2, 0}, Shape{0, 0}})
      CHECK(model(zeros(shape, {i64})).shape() == Shape{shape[0], shape[1], model.options.vocab_size});
  });
}

TEST_CASE("families: config.json of models as they are published are understood, to the last key") {
  const TempDirectory root;
  const auto read = [&](const char* config) {
    if (posix_file_system().exists(root / "config.json")) posix_file_system().remove(root / "config.json");
    posix_file_system().create(root / "config.json")->write(config);
    LlamaOptions o = llama_options(root.path());
    o.tensor.device = Device::meta();
    std::int64_t numbers = 0;
    for (const Parameter& p : Llama(o).parameters()) numbers += p.numel();
    return std::pair(o, numbers);
  };
  const auto [llama, llama_numbers] = read(R"({"architectures": ["LlamaForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
    "use_cache": true, "vocab_size": 128256})");
  CHECK(llama_numbers == 8030261248);
  CHECK(llama.rope_scaling == RotaryScaling{.factor = 8});
  const auto [mistral, mistral_numbers] = read(R"({"architectures": ["MistralForCausalLM"], "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "sliding_window": 4096, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.34.0",
    "use_cache": true, "vocab_size": 32000})");
  CHECK(mistral_numbers == 7241732096);
  CHECK(mistral.window_of(31) == 4096);
  const auto [qwen2, qwen2_numbers] =
      read(R"({"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584,
    "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
    "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": true, "use_mrope": false,
    "use_sliding_window": false, "vocab_size": 152064})");
  CHECK(qwen2_numbers == 7615616512);
  CHECK_FALSE(qwen2.window_of(27).has_value());
  const auto [qwen3, qwen3_numbers] = read(R"({"architectures": ["Qwen3ForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
    "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
    "sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": true, "use_sliding_window": false, "vocab_size": 151936})");
  CHECK(qwen3_numbers == 596049920);
  CHECK(qwen3.query_key_norms);
  const auto [gemma2, gemma2_numbers] =
      read(R"({"architectures": ["Gemma2ForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid",
    "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 16,
    "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096,
    "torch_dtype": "float32", "transformers_version": "4.42.0.dev0", "use_cache": true, "vocab_size": 256000})");
  CHECK(gemma2_numbers == 9241705984);
  CHECK(gemma2.window_of(40) == 4096);
  CHECK_FALSE(gemma2.window_of(41).has_value());
  const auto [gemma3, gemma3_numbers] =
      read(R"({"architectures": ["Gemma3ForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid",
    "eos_token_id": [1, 106], "final_logit_softcapping": null, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
    "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null,
    "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0", "use_cache": true, "vocab_size": 262144})");
  CHECK(gemma3_numbers == 999885952);
  CHECK(gemma3.rotary_of(4).base == 1e4);
  CHECK(gemma3.rotary_of(5).base == 1e6);
  const auto [phi3, phi3_numbers] = read(R"({"_name_or_path": "Phi-3-mini-4k-instruct",
    "architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "bos_token_id": 1, "embd_pdrop": 0.0,
    "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
    "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0,
    "sliding_window": 2047, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.2", "use_cache": true, "vocab_size": 32064})");
  CHECK(phi3_numbers == 3821079552);
  CHECK(phi3.window_of(0) == 2047);
}

TEST_CASE("families: a config.json with anything in it gives a model or an error of Sherd's") {
  std::mt19937 random(7);
  const auto below = [&](std::size_t n) {
    return std::uniform_int_distribution<std::size_t>(0, n - 1)(random);
  };
  const std::vector<json> values = {nullptr,
                                    true,
                                    false,
                                    0,
                                    -1,
                                    1,
                                    2,
                                    3,
                                    7,
                                    16,
                                    1e300,
                                    0.5,
                                    -2.5,
                                    "silu",
                                    "",
                                    "linear",
                                    "yarn",
                                    json::array(),
                                    json::object(),
                                    {"full_attention"},
                                    {{"factor", 2}},
                                    {{"rope_type", "dynamic"}, {"factor", 3}},
                                    9223372036854775807};
  // Keys of all goldens, so that each family hears of the others' too.
  std::vector<json> configs;
  std::vector<std::string> keys;
  for (const Golden& golden : goldens) {
    configs.push_back(json::parse(text_of(golden.folder() / "config.json")));
    for (const auto& [key, value] : configs.back().items()) keys.push_back(key);
  }
  const TempDirectory root;
  int models = 0, errors = 0;
  for (int i = 0; i < 3000; ++i) {
    json config = configs[below(configs.size())];
    for (std::size_t edits = 1 + below(3); edits > 0; --edits) {
      json& place = config[keys[below(keys.size())]];
      if (place.is_object() && !place.empty() && below(2) == 0)
        std::next(place.begin(), static_cast<std::ptrdiff_t>(below(place.size()))).value() =
            values[below(values.size())];
      else
        place = values[below(values.size())];
    }
    if (posix_file_system().exists(root / "config.json")) posix_file_system().remove(root / "config.json");
    posix_file_system().create(root / "config.json")->write(config.dump());
    INFO(config.dump());
    try {
      LlamaOptions o = llama_options(root.path());
      o.tensor.device = Device::meta();
      const Llama model(o);
      const NoGrad guard;
      CHECK(model(zeros({1, 1}, {i64, Device::meta()})).shape() == Shape{1, 1, o.vocab_size});
      ++models;
    } catch (const Error& error) {
      CHECK(std::string_view(error.what()).find('\n') == std::string_view::npos);
      ++errors;
    }
  }
  CHECK(models > 300);
  CHECK(errors > 300);
}
