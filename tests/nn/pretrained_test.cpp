// Hugging Face's folders: what transformers computes with them, what is damaged in them, and what is written.
// The folders are made by tests/golden/make_hugging_face.py.
#include "nn/pretrained.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "collectives/world.h"
#include "nn/generate.h"
#include "nn/optimizer.h"
#include "nn/state_file.h"
#include "runtime/io/durable.h"
#include "shard/fully_shard.h"
#include "shard/summon.h"
#include "tests/counting_file_system.h"
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

const Path goldens = Path(source_root) / "tests/golden/hugging_face";

/// Calls `body` with each folder and the loader of its model.
void each_model(auto&& body) {
  body(goldens / "gpt2", [](auto&&... a) { return load_gpt(a...); });
  for (const char* name : {"llama", "llama_tied"})
    body(goldens / name, [](auto&&... a) { return load_llama(a...); });
}

std::string text_of(const Path& file) { return posix_file_system().read(file); }
void write_text(const Path& file, std::string_view text) {
  if (posix_file_system().exists(file)) posix_file_system().remove(file);
  posix_file_system().create(file)->write(text);
}

/// All tensors of a folder's weights, whatever files they are in.
std::map<std::string, Tensor> tensors_in(const Path& folder) {
  std::map<std::string, Tensor> all;
  for (const std::string& name : posix_file_system().list(folder))
    if (name.starts_with("model") && name.ends_with(".safetensors"))
      for (const auto& [key, tensor] : load_state(folder / name)) CHECK(all.emplace(key, tensor).second);
  return all;
}

bool same(const std::map<std::string, Tensor>& a, const std::map<std::string, Tensor>& b) {
  return std::ranges::equal(a, b, [](const auto& x, const auto& y) {
    return x.first == y.first && x.second.dtype() == y.second.dtype() && same_bits(x.second, y.second);
  });
}

/// A copy of the Llama's folder that may be damaged, and the model that it should give.
struct Copy {
  TempDirectory root;
  Path folder = root / "copy";
  Llama whole = load_llama(goldens / "llama");
  explicit Copy(const Path& from = goldens / "llama") { std::filesystem::copy(from, folder); }

  static constexpr const char* first = "model-00001-of-00003.safetensors";
  static constexpr const char* last = "model-00003-of-00003.safetensors";

  /// Replaces text by text of the same length, so that a header stays as long.
  void replace(const std::string& file, const std::string& from, const std::string& to) const {
    std::string text = text_of(folder / file);
    REQUIRE(text.find(from) != std::string::npos);
    REQUIRE(from.size() == to.size());
    write_text(folder / file, text.replace(text.find(from), from.size(), to));
  }
  /// Changes a JSON file.
  void edit(const std::string& file, auto&& change) const {
    json object = json::parse(text_of(folder / file));
    change(object);
    write_text(folder / file, object.dump());
  }
  /// The names that the index places in a file.
  std::vector<std::string> names_in(const std::string& file) const {
    std::vector<std::string> names;
    const json index = json::parse(text_of(folder / "model.safetensors.index.json"));
    for (const auto& [name, place] : index.at("weight_map").items())
      if (place == file) names.push_back(name);
    return names;
  }
};

Llama other_values(const LlamaOptions& options) {
  manual_seed(99);
  return Llama(options);
}

/// What is damaged or missing is exactly `lost`; strict says so in a line with `word` before anything
/// changes, and else all other tensors have their values, and the lost ones those from before.
LoadReport check_damage(const Copy& copy, const std::vector<std::string>& lost, const std::string& word) {
  const Llama before = other_values(copy.whole.options);
  Llama strict = before.clone(), tolerant = before.clone();
  const std::string message = message_of<ValueError>([&] { load_pretrained(strict, copy.folder); });
  CHECK(one_line_about(message, "load_pretrained"));
  CHECK_THAT(message, ContainsSubstring(word) && ContainsSubstring("nothing was changed"));
  LoadReport report = load_pretrained(tolerant, copy.folder, {Strict::no});
  CHECK_FALSE(report.complete());
  std::vector<std::string> reported = report.missing;
  for (const auto& [name, why] : report.damaged) {
    reported.push_back(name);
    CHECK(!why.empty());
    CHECK(why.find('\n') == std::string::npos);
  }
  std::ranges::sort(reported);
  CHECK(reported == lost);
  for (const auto& [name, values] : tolerant.state_dict()) {
    INFO(name);
    const bool is_lost = std::ranges::binary_search(lost, name);
    CHECK(same_bits(values, (is_lost ? before : copy.whole).state_dict().at(name)));
    CHECK(same_bits(strict.state_dict().at(name), before.state_dict().at(name)));
  }
  return report;
}

}  // namespace

TEST_CASE("pretrained: logits, greedy tokens, loss and the norm of gradients are transformers'") {
  each_model([](const Path& folder, auto load) {
    INFO(folder);
    auto model = load(folder, f32);
    model.eval();
    const StateDict expected = load_state(folder / "expected.safetensors");
    const Tensor tokens = expected.at("tokens"), logits = model(tokens);
    CHECK(distance(logits.detach(), expected.at("logits")) < 1e-5);
    const std::int64_t t = tokens.size(1), vocab = logits.size(2);
    const Tensor loss = cross_entropy(reshape(narrow(logits, 1, 0, t - 1), {-1, vocab}),
                                      reshape(narrow(tokens, 1, 1, t - 1), {-1}));
    CHECK(distance(loss.detach(), expected.at("loss")) < 1e-5);
    loss.backward();
    const double norm = expected.at("grad_norm").item();
    CHECK(std::abs(grad_norm(model.parameters()).item() - norm) < 1e-5 * norm);
    const auto prompt = narrow(select(tokens, 0, 0), 0, 0, 4).template to_vector<std::int64_t>();
    const auto continuation = expected.at("continuation").template to_vector<std::int64_t>();
    CHECK(
        generate(model, prompt, {.max_new_tokens = expected.at("continuation").numel(), .temperature = 0}) ==
        continuation);
    // A step changes every parameter and lowers the loss.
    AdamW optimizer(model.parameters(), {.lr = 1e-3});
    optimizer.step();
    const NoGrad guard;
    CHECK(cross_entropy(reshape(narrow(model(tokens), 1, 0, t - 1), {-1, vocab}),
                        reshape(narrow(tokens, 1, 1, t - 1), {-1}))
              .item() < loss.item());
  });
}

TEST_CASE("pretrained: what is written is what was read, to the bit, in files of any size", "[one thread]") {
  each_model([](const Path& folder, auto load) {
    const auto model = load(folder);
    const auto original = tensors_in(folder);
    const Tensor tokens = load_state(folder / "expected.safetensors").at("tokens");
    CHECK(model.parameters().front().local().dtype() == original.begin()->second.dtype());
    for (const std::uint64_t size : {std::uint64_t{1}, std::uint64_t{9000}, std::uint64_t{1} << 40}) {
      INFO(folder << " " << size);
      const TempDirectory root;
      save_pretrained(model, root / "it", {.max_shard_size = size, .config_from = folder});
      const auto again = load(root / "it");
      CHECK(same(tensors_in(root / "it"), original));
      CHECK(same_bits(again(tokens).detach(), model(tokens).detach()));
      std::size_t files = 0;
      for (const std::string& name : posix_file_system().list(root / "it")) {
        if (!name.ends_with(".safetensors")) continue;
        ++files;
        const SafetensorsFile file(root / "it" / name);
        CHECK(file.metadata().at("format") == "pt");
        std::uint64_t bytes = 0;
        for (const TensorEntry& entry : file.entries()) bytes += entry.bytes;
        CHECK((bytes <= size || file.entries().size() == 1));
      }
      CHECK((files == 1) == (size > 9000));
      CHECK(posix_file_system().exists(root / "it" / "model.safetensors.index.json") == (files > 1));
      // The settings are the same, and what the model does not know stays.
      json mine = json::parse(text_of(root / "it" / "config.json")),
           theirs = json::parse(text_of(folder / "config.json"));
      CHECK(mine.at("eos_token_id") == theirs.at("eos_token_id"));
      CHECK(mine.at("torch_dtype") == theirs.at("dtype"));
      for (const auto& [key, value] : mine.items())
        if (theirs.contains(key)) CHECK(value == theirs.at(key));
    }
  });
}

TEST_CASE("pretrained: every setting that config.json knows comes back") {
  manual_seed(7);
  const Tensor tokens = randint(0, 16, {2, 8}, {i64});
  for (const bool other : {false, true}) {
    const TempDirectory root;
    GptOptions g{.layers = 1, .heads = 2, .width = 8, .context = 8, .vocab = 16};
    if (other) {
      g.dropout = 0.25, g.embedding_dropout = 0.5, g.norm_eps = 0.1;
      g.gelu = GeluForm::tanh;
      g.tie_word_embeddings = false;
      g.tensor.dtype = f64;
    }
    Gpt gpt(g);
    save_pretrained(gpt, root / "gpt");
    Gpt gpt_again = load_gpt(root / "gpt");
    CHECK(gpt_again.options.dropout == g.dropout);
    CHECK(gpt_again.options.embedding_dropout == g.embedding_dropout);
    gpt.eval(), gpt_again.eval();
    CHECK(same_bits(gpt_again(tokens), gpt(tokens)));

    LlamaOptions l{.vocab_size = 16, .hidden_size = 8, .intermediate_size = 12, .num_hidden_layers = 1};
    l.num_attention_heads = 2, l.max_position_embeddings = 8;
    if (other) {
      l.num_key_value_heads = 1, l.head_dim = 6, l.rms_norm_eps = 0.1, l.rope_theta = 50;
      l.rope_scaling = {4, 1, 4, 4};
      l.mlp_bias = l.tie_word_embeddings = true;
      l.attention_bias = AttentionBias::all;
      l.tensor.dtype = bf16;
    }
    const Llama llama(l);
    save_pretrained(llama, root / "llama");
    CHECK(same_bits(load_llama(root / "llama")(tokens), llama(tokens)));
  }
}

TEST_CASE("pretrained: 8-bit floats are read, with a scale of the tensor, its rows or its blocks") {
  const Path folder = goldens / "llama_eight_bits";
  const StateDict expected = load_state(folder / "expected.safetensors");
  for (const DType dtype : {f32, bf16}) {
    const Llama model = load_llama(folder, dtype);
    CHECK(model.state_dict().size() == expected.size());
    for (const auto& [name, values] : model.state_dict()) {
      INFO(name);
      CHECK(same_bits(values, to(expected.at(name), dtype)));
    }
  }
  const Copy copy(folder);
  copy.replace("model.safetensors",
               R"("model.layers.0.self_attn.k_proj.weight_scale":{"dtype":"F32","shape":[16,1])",
               R"("model.layers.0.self_attn.k_proj.weight_scale":{"dtype":"F32","shape":[1,16])");
  Llama model(llama_options(folder));
  const LoadReport report = load_pretrained(model, copy.folder, {Strict::no});
  REQUIRE(report.damaged.size() == 1);
  CHECK(report.damaged[0].name == "model.layers.0.self_attn.k_proj.weight");
  CHECK_THAT(report.damaged[0].why,
             ContainsSubstring("scale has shape (1, 16)") && ContainsSubstring("5 x 8"));
}

TEST_CASE("pretrained: files without the head's prefix, and with buffers of old versions, load") {
  each_model([](const Path& folder, auto load) {
    INFO(folder);
    const auto model = load(folder);
    const bool gpt = folder.filename() == "gpt2";
    const std::string trunk = gpt ? "transformer." : "model.";
    StateDict bare;
    for (const auto& [name, values] : tensors_in(folder))
      bare.emplace_back(name.starts_with(trunk) ? name.substr(trunk.size()) : name, values);
    bare.emplace_back(gpt ? "h.0.attn.bias" : "layers.0.self_attn.rotary_emb.inv_freq", ones({1, 1, 4, 4}));
    if (gpt) bare.emplace_back("h.1.attn.masked_bias", ones({}));
    if (folder.filename() != "llama")  // a tied head may be there too
      bare.emplace_back("lm_head.weight", clone(bare.at(gpt ? "wte.weight" : "embed_tokens.weight")));
    const TempDirectory root;
    std::filesystem::copy(folder / "config.json", root / "config.json");
    save_state(root / "model.safetensors", bare);
    const auto again = load(root.path());
    for (const auto& [name, values] : again.state_dict())
      CHECK(same_bits(values, model.state_dict().at(name)));
  });
}

TEST_CASE("pretrained: a file that is cut short anywhere loses what lay behind the cut, and nothing else") {
  const std::uint64_t size = std::filesystem::file_size(goldens / "llama" / Copy::last);
  for (const std::uint64_t left :
       {size - 1, size - 3000, size / 2, std::uint64_t{1000}, std::uint64_t{8}, std::uint64_t{0}}) {
    INFO(left);
    const Copy copy;
    const SafetensorsFile file(copy.folder / Copy::last);
    std::uint64_t data = 0;  // bytes of tensors in the whole file
    for (const TensorEntry& entry : file.entries()) data += entry.bytes;
    std::vector<std::string> lost;
    for (const TensorEntry& entry : file.entries())
      if (size - data + entry.begin + entry.bytes > left) lost.push_back(entry.name);
    std::ranges::sort(lost);
    std::filesystem::resize_file(copy.folder / Copy::last, left);
    const LoadReport report = check_damage(copy, lost, "cut short");
    CHECK(report.missing.empty());
    CHECK(report.unknown.empty());
  }
}

TEST_CASE("pretrained: what an index says wrongly is damaged by name, whatever it says") {
  for (const json& place : {json("../x.safetensors"), json("/etc/x.safetensors"), json("a/b.safetensors"),
                            json(".."), json("config.json"), json(""), json(3), json(nullptr),
                            json({"x.safetensors"}), json(std::string("x\0.safetensors", 14))}) {
    INFO(place);
    const Copy copy;
    copy.edit("model.safetensors.index.json",
              [&](json& index) { index["weight_map"]["model.norm.weight"] = place; });
    check_damage(copy, {"model.norm.weight"}, "no safetensors file of the folder");
  }
  {
    const Copy copy;
    std::filesystem::remove(copy.folder / Copy::last);
    check_damage(copy, copy.names_in(Copy::last), Copy::last);
  }
  {
    const Copy copy;  // the header is no JSON
    copy.replace(Copy::last, R"({"__metadata__")", R"({__"metadata__")");
    check_damage(copy, copy.names_in(Copy::last), "JSON");
  }
  {
    const Copy copy;
    copy.edit("model.safetensors.index.json",
              [&](json& index) { index["weight_map"]["model.norm.weight"] = Copy::first; });
    check_damage(copy, {"model.norm.weight"}, "lacks it");
  }
  {
    const Copy copy;  // every tensor of the first file is in another one too
    std::filesystem::copy(copy.folder / Copy::first, copy.folder / "twice.safetensors");
    const std::vector<std::string> lost = copy.names_in(Copy::first);
    copy.edit("model.safetensors.index.json",
              [&](json& index) { index["weight_map"][lost[0]] = "twice.safetensors"; });
    check_damage(copy, lost, "and in 'twice.safetensors'");
  }
  for (const char* text : {"", "[]", "{}", R"({"weight_map":[]})", "{\"weight_map\":\xff}"}) {
    const Copy copy;
    write_text(copy.folder / "model.safetensors.index.json", text);
    Llama model(copy.whole.options);
    CHECK(one_line_about(message_of<ValueError>([&] { load_pretrained(model, copy.folder, {Strict::no}); }),
                         "model.safetensors.index.json"));
  }
  {
    const Copy copy;  // a name too many
    std::string text = R"({"weight_map":{"0":"0")";
    for (int i = 1; i <= 1 << 17; ++i) text += fmt::format(R"(,"{}":"0")", i);
    write_text(copy.folder / "model.safetensors.index.json", text + "}}");
    Llama model(copy.whole.options);
    CHECK(one_line_about(message_of<ValueError>([&] { load_pretrained(model, copy.folder, {Strict::no}); }),
                         "more than 131072 names"));
    write_text(copy.folder / "config.json", std::string((std::size_t{1} << 21) + 1, ' '));
    CHECK(one_line_about(message_of<FileError>([&] { load_llama(copy.folder); }), "2097152"));
  }
  const TempDirectory empty_folder;
  Llama model(llama_options(goldens / "llama"));
  CHECK(one_line_about(message_of<FileError>([&] { load_pretrained(model, empty_folder.path()); }),
                       "has no model.safetensors"));
}

TEST_CASE("pretrained: an entry of another dtype, shape or name does not keep the others from loading") {
  const std::string norm = R"("model.norm.weight":{"dtype":"BF16","shape":[32])",
                    query = "model.layers.0.self_attn.q_proj.weight",
                    key = "model.layers.0.self_attn.k_proj.weight";
  const auto damaged_by = [&](const std::string& from, const std::string& to, const std::string& name,
                              const std::string& word) {
    INFO(to);
    const Copy copy;
    for (const char* file : {Copy::first, "model-00002-of-00003.safetensors", Copy::last})
      if (text_of(copy.folder / file).find(from) != std::string::npos) copy.replace(file, from, to);
    const LoadReport report = check_damage(copy, {name}, word);
    CHECK(report.missing.empty());
    CHECK(report.damaged.size() == 1);
  };
  damaged_by(norm, R"("model.norm.weight":{"dtype":"BF17","shape":[32])", "model.norm.weight",
             "'BF17' is unknown");
  damaged_by(norm, R"("model.norm.weight":{"dtype":"I16" ,"shape":[32])", "model.norm.weight",
             "'I16' is unknown");
  damaged_by(norm, R"("model.norm.weight":{"dtype":"F32" ,"shape":[16])", "model.norm.weight", "shape [16]");
  damaged_by(norm, R"("model.norm.weight":{"dtype":"BF16","shape":[99])", "model.norm.weight",
             "takes 198 bytes");
  damaged_by(norm, R"("model.norm.weight":{"dtype":"I64", "shape": [8])", "model.norm.weight", "I64");
  damaged_by('"' + key + R"(":{"dtype":"BF16","shape":[16,32])",
             '"' + key + R"(":{"dtype":"BF16","shape":[32,16])", key, "shape [32, 16]");

  const Copy copy;
  copy.replace(Copy::last, "model.norm.weight", "model.form.weight");
  const LoadReport report = check_damage(copy, {"model.norm.weight"}, "1 unknown ('model.form.weight')");
  CHECK(report.damaged.size() == 1);  // the index still has it
  copy.edit("model.safetensors.index.json",
            [&](json& index) { index["weight_map"].erase("model.norm.weight"); });
  CHECK(check_damage(copy, {"model.norm.weight"}, "missing").unknown ==
        std::vector<std::string>{"model.form.weight"});

  // What only reading tells, is told when the others are loaded.
  const TempDirectory root;
  save_pretrained(copy.whole, root / "it");
  std::string text = text_of(root / "it" / "model.safetensors");
  text.back() ^= 1;
  write_text(root / "it" / "model.safetensors", text);
  Llama model = other_values(copy.whole.options);
  CHECK_THAT(message_of<ValueError>([&] { load_pretrained(model, root / "it"); }),
             ContainsSubstring("1 damaged") && ContainsSubstring("checksum") &&
                 ContainsSubstring("the others were loaded"));
  int others = 0;
  for (const auto& [name, values] : model.state_dict())
    others += !same_bits(values, copy.whole.state_dict().at(name));
  CHECK(others == 1);
  CHECK(load_pretrained(model, root / "it", {Strict::no}).damaged.size() == 1);
}

TEST_CASE("pretrained: a setting that is not supported is refused with its key, its value and what is",
          "[one thread]") {
  const auto refused = [](const Path& folder, const std::string& key, const json& value,
                          const std::string& word) {
    INFO(key << " " << value);
    const TempDirectory root;
    json config = json::parse(text_of(folder / "config.json"));
    config[json::json_pointer("/" + key)] = value;
    write_text(root / "config.json", config.dump());
    const std::string message = message_of<ValueError>([&] {
      (void)(folder.filename() == "gpt2" ? gpt_options(root.path()).layers
                                         : llama_options(root.path()).vocab_size);
    });
    CHECK(one_line_about(message, "pretrained"));
    CHECK_THAT(message, ContainsSubstring(key.substr(key.rfind('/') + 1)) && ContainsSubstring(word) &&
                            ContainsSubstring("config.json") && ContainsSubstring("supported: "));
    if (value.is_primitive()) CHECK_THAT(message, ContainsSubstring(value.dump().substr(0, 20)));
  };
  const json no_size[] = {-1,  0,    1e9,           4611686018427387904, 1.5,
                          "7", true, json::array(), json::object(),      "nan"};
  for (const json& value : no_size) {
    for (const char* key : {"vocab_size", "n_positions", "n_embd", "n_layer", "n_head"})
      refused(goldens / "gpt2", key, value, "an integer from 1 to");
    for (const char* key :
         {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "max_position_embeddings"})
      refused(goldens / "llama", key, value, "an integer from 1 to");
  }
  for (const json& value : {json(-1), json(0), json(1e300), json("7"), json(false)}) {
    refused(goldens / "gpt2", "layer_norm_epsilon", value, "above 0");
    refused(goldens / "llama", "rms_norm_eps", value, "above 0");
    refused(goldens / "llama", "rope_parameters/factor", value, "above 0");
    refused(goldens / "llama", "rope_parameters/rope_theta", value, "above 0");
  }
  refused(goldens / "gpt2", "model_type", "llama", "\"gpt2\"");
  refused(goldens / "llama", "model_type", "gemma3",
          "llama, mistral, qwen2, qwen3, gemma2, gemma3_text, phi3");
  refused(goldens / "gpt2", "activation_function", "relu", "gelu_new, gelu_pytorch_tanh, gelu");
  refused(goldens / "gpt2", "n_inner", 65, "64");
  refused(goldens / "gpt2", "attn_pdrop", 0.5, "resid_pdrop");
  refused(goldens / "gpt2", "embd_pdrop", 1.0, "below 1");
  refused(goldens / "gpt2", "scale_attn_weights", false, "true");
  refused(goldens / "gpt2", "dtype", "int8", "bfloat16");
  refused(goldens / "gpt2", "tie_word_embeddings", 1, "true, false");
  refused(goldens / "llama", "hidden_act", "relu", "silu, gelu_pytorch_tanh, gelu_new, gelu");
  refused(goldens / "llama", "rope_parameters/rope_type", "longrope",
          "default, linear, dynamic, llama3, yarn");
  refused(goldens / "llama", "rope_parameters/beta_fast", 32.0, "low_freq_factor");
  refused(goldens / "llama_dynamic", "rope_parameters/factor", 0.5, "a number from 1");
  refused(goldens / "llama_yarn", "rope_parameters/beta_fast", 0.25, "above beta_slow, 0.5");
  refused(goldens / "llama_yarn", "rope_parameters/truncate", 1, "true, false");
  refused(goldens / "mistral", "attention_bias", true, "false");
  refused(goldens / "mistral", "sliding_window", 0, "an integer from 1");
  refused(goldens / "mistral", "partial_rotary_factor", 0.5, "1.0");
  refused(goldens / "qwen2", "layer_types", {"full_attention", "chunked_attention", "full_attention"},
          "full_attention, sliding_attention");
  refused(goldens / "qwen2", "layer_types", {"full_attention"}, "3 entries");
  refused(goldens / "qwen3", "layer_types", 3, "a list");
  refused(goldens / "gemma2", "hidden_activation", "relu", "gelu_pytorch_tanh");
  refused(goldens / "gemma2", "use_bidirectional_attention", true, "false");
  refused(goldens / "gemma2", "final_logit_softcapping", 0, "above 0");
  refused(goldens / "gemma3", "attn_logit_softcapping", 50.0, "null");
  refused(goldens / "gemma3", "rope_parameters/sliding_attention/rope_type", "linear", "default");
  refused(goldens / "gemma3", "rope_parameters/full_attention/factor", -1, "above 0");
  refused(goldens / "phi3", "rope_parameters/rope_type", "longrope", "default");
  refused(goldens / "phi3", "resid_pdrop", 0.1, "0.0");
  refused(goldens / "llama", "rope_parameters/full_attention", json::object(), "rope_theta");
  refused(goldens / "llama", "rope_parameters/high_freq_factor", 0.5, "above low_freq_factor");
  refused(goldens / "llama", "rope_scaling", 3, "an object");
  refused(goldens / "llama", "quantization_config", {{"quant_method", "gptq"}}, "fp8, compressed-tensors");

  // A key that may bear on the result and is not known.
  for (const char* folder : {"gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"})
    for (const char* key : {"num_experts", "logit_scale", "Rope_theta"}) {
      const Copy copy(goldens / folder);
      const auto read = [&] {
        return std::string_view(folder) == "gpt2" ? gpt_options(copy.folder).layers
                                                  : llama_options(copy.folder).num_hidden_layers;
      };
      copy.edit("config.json", [&](json& config) { config[key] = nullptr; });
      CHECK_NOTHROW(read());  // null says that it is not there
      copy.edit("config.json", [&](json& config) { config[key] = 8; });
      const std::string message = message_of<ValueError>(read);
      INFO(message);
      CHECK(one_line_about(message, key));
      CHECK_THAT(message, ContainsSubstring("config.json") && ContainsSubstring("known: ") &&
                              ContainsSubstring("quantization_config, "));
    }

  // A key that only has its default is told of as well.
  for (const json& config : {json{{"model_type", "gpt2"}, {"resid_pdrop", 0.0}},
                             json{{"model_type", "gpt2"}, {"resid_pdrop", 0.0}, {"attn_pdrop", nullptr}}}) {
    const TempDirectory root;
    write_text(root / "config.json", config.dump());
    const std::string message = message_of<ValueError>([&] { gpt_options(root.path()); });
    CHECK(one_line_about(message, "attn_pdrop"));
    CHECK_THAT(message, ContainsSubstring("not there"));
  }

  for (const char* text : {"", "{", "[1]", "7", "{\"a\":\xff}", "[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]"}) {
    const TempDirectory root;
    write_text(root / "config.json", text);
    CHECK(one_line_about(message_of<ValueError>([&] { gpt_options(root.path()); }), "config.json"));
  }
  CHECK_THROWS_AS(llama_options(goldens), FileError);

  // Sizes that are allowed and not the files' are an error before they take memory.
  const Copy copy(goldens / "gpt2");
  copy.edit("config.json", [](json& config) { config["n_embd"] = 1 << 20, config["vocab_size"] = 1 << 24; });
  CHECK(one_line_about(message_of<ValueError>([&] { load_gpt(copy.folder); }),
                       "the model takes (16777216, 1048576)"));
}

TEST_CASE("pretrained: settings in the words of older versions are understood") {
  const TempDirectory root;
  const auto with = [&](const json& more) {
    json config = {
        {"model_type", "llama"}, {"hidden_size", 64}, {"torch_dtype", "float16"}, {"rope_theta", 500.0}};
    config.update(more);
    write_text(root / "config.json", config.dump());
    return llama_options(root.path());
  };
  const RotaryScaling scaling{8, 1, 4, 8192};
  LlamaOptions o = with({{"rope_scaling",
                          {{"type", "llama3"},
                           {"factor", 8.0},
                           {"low_freq_factor", 1.0},
                           {"high_freq_factor", 4.0},
                           {"original_max_position_embeddings", 8192}}}});
  CHECK(o.rope_scaling == scaling);
  CHECK(o.rope_theta == 500);
  CHECK(o.tensor.dtype == f16);
  CHECK(o.hidden_size == 64);
  CHECK(o.num_hidden_layers == 32);
  CHECK_FALSE(o.num_key_value_heads.has_value());
  o = with({{"rope_scaling", nullptr}, {"head_dim", nullptr}, {"rope_parameters", {{"rope_theta", 7.0}}}});
  CHECK(o.rope_scaling == RotaryScaling{});
  CHECK(o.rope_theta == 7);
  CHECK(one_line_about(message_of<ValueError>([&] { with({{"rope_scaling", {{"type", "llama3"}}}}); }),
                       "factor is missing"));
}

TEST_CASE("pretrained: loading holds the model and about one tensor more") {
  each_model([](const Path& folder, auto load) {
    MemoryLedger& memory = Context::current().memory();
    const std::int64_t before = memory.held(DeviceType::cpu).total();
    memory.reset_peak(DeviceType::cpu);
    const auto model = load(folder, f32);
    std::int64_t bytes = 0, largest = 0;
    for (const Parameter& p : model.parameters()) {
      bytes += 4 * p.numel();
      largest = std::max(largest, 4 * p.numel());
    }
    CHECK(static_cast<double>(memory.peak(DeviceType::cpu) - before) <
          1.125 * static_cast<double>(bytes + 2 * largest) + 64 * 64);
  });
}

TEST_CASE("pretrained: a sharded model loads, also from meta, and one rank saves it whole") {
  for (const int ranks : {1, 2, 3})
    for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat})
      for (const Device device : {Device::cpu(), Device::meta()}) {
        const TempDirectory root;
        const Path from = goldens / "gpt2";
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          GptOptions options = gpt_options(from);
          options.tensor.device = device;
          Gpt model(options);
          for (GptBlock& block : model.blocks) shard::fully_shard(block, {.layout = layout});
          shard::fully_shard(model, {.layout = layout});
          load_pretrained(model, from);
          const Gpt whole = load_gpt(from);
          for (const auto& [name, values] : shard::full_state_dict(model))
            expect(same_bits(values, whole.state_dict().at(name)), "{} differs", name);
          const bool parts = world.size() > 1 && layout == shard::GroupLayout::per_parameter;
          if (parts && world.rank() == 0)
            expect(message_of<StateError>([&] {
                     save_pretrained(model, root / "it");
                   }).find("summon_full_params") != std::string::npos,
                   "parts are saved");
          const auto scope = shard::summon_full_params(model);
          if (world.rank() == 0) save_pretrained(model, root / "it");
        }));
        CHECK(same(tensors_in(root / "it"), tensors_in(from)));
      }
}

TEST_CASE("pretrained: a save that breaks anywhere leaves the folder that was there, or the new one",
          "[one thread]") {
  const Llama old = load_llama(goldens / "llama_tied"), mine = other_values(old.options);
  for (int n = 0;; ++n) {
    INFO(n);
    const TempDirectory root;
    save_pretrained(old, root / "it");
    CountingFileSystem files(n, Fault::killed);
    std::string thrown = message_of<FileError>([&] { save_pretrained(mine, root / "it", {.files = files}); });
    const Llama found = load_llama(committed_directory(root / "it"));
    const auto is = [&](const Llama& model) {
      return std::ranges::equal(found.state_dict(), model.state_dict(), [](const auto& a, const auto& b) {
        return a.first == b.first && same_bits(a.second, b.second);
      });
    };
    CHECK((is(old) || is(mine)));
    if (!files.broke()) {
      CHECK(is(mine));
      CHECK(n > 5);
      break;
    }
  }
}

TEST_CASE("pretrained: what cannot be saved or loaded is refused in one line") {
  const TempDirectory root;
  Llama model = load_llama(goldens / "llama_tied");
  std::filesystem::create_directory(root / "theirs");
  write_text(root / "theirs" / "tokenizer.json", "{}");
  CHECK(one_line_about(message_of<FileError>([&] { save_pretrained(model, root / "theirs"); }),
                       "tokenizer.json"));
  CHECK(posix_file_system().list(root / "theirs") == std::vector<std::string>{"tokenizer.json"});
  CHECK(one_line_about(
      message_of<ValueError>([&] { save_pretrained(model, root / "x", {.max_shard_size = 0}); }),
      "max_shard_size"));
  CHECK_THROWS_AS(save_pretrained(model, root / "none" / "x"), FileError);
  LlamaOptions options = model.options;
  options.tensor.device = Device::meta();
  CHECK(one_line_about(message_of<StateError>([&] { save_pretrained(Llama(options), root / "x"); }), "meta"));
  // Where a value is missing there is nothing to begin with.
  const Copy copy;
  std::filesystem::remove(copy.folder / Copy::last);
  options = copy.whole.options;
  options.tensor.device = Device::meta();
  Llama nowhere(options);
  CHECK(one_line_about(message_of<DeviceError>([&] { load_pretrained(nowhere, copy.folder, {Strict::no}); }),
                       "on meta"));
  CHECK_THROWS_AS(load_gpt(goldens / "llama"), ValueError);
  CHECK_THROWS_AS(load_llama(goldens / "llama", i32), DTypeError);
}
