#include "nn/pretrained_config.h"

#include <array>
#include <cmath>
#include <set>
#include <vector>

#include "nn/pretrained.h"
#include "runtime/error.h"
#include "runtime/io/foreign.h"
#include "runtime/shown.h"

namespace sherd::nn {
namespace pretrained {

using nlohmann::json;
using Path = FileSystem::Path;

json read_object(const Path& file, FileSystem& files, std::uint64_t most_bytes) {
  constexpr int most_levels = 16;
  constexpr std::size_t most_names = std::size_t{1} << 17;  // as many tensors as a state file has
  const std::string text = files.read(file, most_bytes);
  const std::string name = shown(file.string(), 300);
  if (const std::string_view kind = foreign_file(text); !kind.empty())
    fail<ValueError>("pretrained: '{}': {}", name, kind);
  json object;
  std::size_t names = 0;
  try {
    object = json::parse(text, [&](int depth, json::parse_event_t event, const json&) {
      names += event == json::parse_event_t::key ? 1 : 0;
      check<ValueError>(
          names <= most_names,
          "pretrained: '{}': holds more than {} names, the limit; save the model in fewer tensors", name,
          most_names);
      check<ValueError>(depth <= most_levels, "pretrained: '{}': nested deeper than {} levels", name,
                        most_levels);
      return true;
    });
  } catch (const json::exception& error) {
    fail<ValueError>("pretrained: '{}': is not valid JSON: {}", name, shown(error.what(), 300));
  }
  check<ValueError>(object.is_object(), "pretrained: '{}': holds {}, not an object", name,
                    object.type_name());
  return object;
}

namespace {

// Limits of sizes, under which no product of them is beyond 2^63.
constexpr std::int64_t many = std::int64_t{1} << 24, wide = std::int64_t{1} << 20,
                       heads = std::int64_t{1} << 14, deep = std::int64_t{1} << 12;
constexpr std::int64_t fp8_block = 128;

/// Settings of config.json, asked for by key; null stands for none.
class Config {
 public:
  Config(std::string file, json object) : file_(std::move(file)), object_(std::move(object)) {}
  Config(const Path& folder, FileSystem& files, std::string_view model_type)
      : Config(shown((folder / "config.json").string(), 300), read_object(folder / "config.json", files)) {
    only("model_type", std::string(model_type));
  }

  /// Lets `key` be asked for where the file has it as `alias`. Refuses both with other values.
  void rename(const std::string& alias, const std::string& key) {
    const json* value = find(alias);
    if (value == nullptr) return;
    if (const json* own = find(key); own != nullptr && *own != *value)
      refuse(alias,
             fmt::format("that of {}, which it is another word for, {}", key, own->dump(-1, ' ', true)));
    object_[key] = json(*value);
  }
  /// An integer from 1 to `most`.
  std::int64_t size(const std::string& key, std::int64_t fallback, std::int64_t most) const {
    return size(key, most).value_or(fallback);
  }
  std::optional<std::int64_t> size(const std::string& key, std::int64_t most) const {
    const json* value = find(key);
    if (value == nullptr) return {};
    const bool fits = value->is_number_unsigned() && value->get<std::uint64_t>() >= 1 &&
                      value->get<std::uint64_t>() <= static_cast<std::uint64_t>(most);
    if (!fits) refuse(key, fmt::format("an integer from 1 to {}", most));
    return value->get<std::int64_t>();
  }
  /// Two such integers.
  std::pair<std::int64_t, std::int64_t> pair(const std::string& key,
                                             std::pair<std::int64_t, std::int64_t> fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    const auto fits = [](const json& n) {
      return n.is_number_unsigned() && n.get<std::uint64_t>() >= 1 && n.get<std::uint64_t>() <= many;
    };
    if (!value->is_array() || value->size() != 2 || !fits(value->at(0)) || !fits(value->at(1)))
      refuse(key, "two integers from 1");
    return {value->at(0).get<std::int64_t>(), value->at(1).get<std::int64_t>()};
  }
  /// A number above 0, so far as f32 goes.
  double positive(const std::string& key, double fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_number() || !(value->get<double>() > 0 && value->get<double>() < 1e38))
      refuse(key, "a number above 0");
    return value->get<double>();
  }
  /// A probability below 1.
  double dropout(const std::string& key, double fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_number() || !(value->get<double>() >= 0 && value->get<double>() < 1))
      refuse(key, "a number from 0, below 1");
    return value->get<double>();
  }
  bool flag(const std::string& key, bool fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) refuse(key, "true, false");
    return value->get<bool>();
  }
  /// One of `choices`, whose text it gives.
  template <class T>
  T choice(const std::string& key, T fallback,
           const std::vector<std::pair<std::string_view, T>>& choices) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    std::string names;
    for (const auto& [name, meaning] : choices) {
      if (value->is_string() && value->get_ref<const std::string&>() == name) return meaning;
      names += (names.empty() ? "" : ", ") + std::string(name);
    }
    refuse(key, names);
  }
  /// Refuses every other value.
  void only(const std::string& key, const json& value) const {
    if (const json* given = find(key); given != nullptr && *given != value) refuse(key, value.dump());
  }
  std::optional<Config> object(const std::string& key) const {
    const json* value = find(key);
    if (value == nullptr) return {};
    if (!value->is_object()) refuse(key, "an object");
    return Config(fmt::format("{}': '{}", file_, key), *value);
  }
  /// Refuses keys that are none of these.
  void no_others(const std::set<std::string>& keys) const {
    for (const auto& [key, value] : object_.items())
      if (!keys.contains(key)) refuse(key, fmt::format("{}", fmt::join(keys, ", ")));
  }
  void need(const std::string& key) const {
    check<ValueError>(find(key) != nullptr, "pretrained: '{}': {} is missing", file_, key);
  }

  [[noreturn]] void refuse(const std::string& key, std::string_view supported) const {
    const json* given = find(key);
    fail<ValueError>("pretrained: '{}': {} is {}; supported: {}", file_, shown(key),
                     given ? shown(given->dump(-1, ' ', true)) : "not there, or null", supported);
  }

 private:
  const json* find(const std::string& key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  std::string file_;
  json object_;
};

/// Words of other models that transformers takes for GPT-2's (`attribute_map`).
constexpr std::array<std::pair<std::string_view, std::string_view>, 4> gpt_aliases = {
    {{"hidden_size", "n_embd"},
     {"max_position_embeddings", "n_positions"},
     {"num_attention_heads", "n_head"},
     {"num_hidden_layers", "n_layer"}}};

const std::vector<std::pair<std::string_view, DType>> dtypes = {
    {"float32", f32}, {"bfloat16", bf16}, {"float16", f16}, {"float64", f64}};

/// `dtype`, or as it was called before, `torch_dtype`.
DType dtype_of(const Config& c) { return c.choice("dtype", c.choice("torch_dtype", f32, dtypes), dtypes); }

std::string_view name_in_config(DType dtype) {
  for (const auto& [name, value] : dtypes)
    if (value == dtype) return name;
  fail<InternalError>("pretrained: no name for parameters of {}", name_of(dtype));
}

/// Weights of 8-bit floats are read to floats; other forms are not.
std::optional<Config> quantization_of(const Config& c) {
  const std::optional<Config> q = c.object("quantization_config");
  if (q) q->choice("quant_method", true, {{"fp8", true}, {"compressed-tensors", true}});
  return q;
}

/// `rope_parameters`, or as they were before, `rope_scaling` beside `rope_theta`.
void read_rotary(const Config& c, LlamaOptions& o) {
  o.rope_theta = c.positive("rope_theta", o.rope_theta);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const std::optional<Config> rope = c.object(key);
    if (!rope) continue;
    rope->no_others({"rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
                     "original_max_position_embeddings", "partial_rotary_factor"});
    rope->only("partial_rotary_factor", 1.0);
    o.rope_theta = rope->positive("rope_theta", o.rope_theta);
    const std::vector<std::pair<std::string_view, bool>> types = {{"default", false}, {"llama3", true}};
    if (!rope->choice("rope_type", rope->choice("type", false, types), types)) continue;
    for (const char* needed :
         {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
      rope->need(needed);
    o.rope_scaling = {rope->positive("factor", 1), rope->positive("low_freq_factor", 1),
                      rope->positive("high_freq_factor", 1),
                      rope->positive("original_max_position_embeddings", 1)};
    if (o.rope_scaling.high <= o.rope_scaling.low)
      rope->refuse("high_freq_factor", fmt::format("above low_freq_factor, {}", o.rope_scaling.low));
  }
}

/// `from` without what `own` says anew, or what would contradict it.
json merged(json from, const json& own) {
  for (const char* stale : {"dtype", "n_ctx", "n_inner", "rope_parameters", "rope_scaling",
                            "quantization_config", "head_dim", "transformers_version"})
    from.erase(stale);
  from.update(own);
  return from;
}

}  // namespace

std::pair<std::int64_t, std::int64_t> scale_block(const Path& folder, FileSystem& files) {
  const Config c(shown((folder / "config.json").string(), 300), read_object(folder / "config.json", files));
  const std::optional<Config> q = quantization_of(c);
  return !q ? std::pair{fp8_block, fp8_block} : q->pair("weight_block_size", {fp8_block, fp8_block});
}

json config_of(const GptOptions& o, DType dtype, json from) {
  for (const auto& [alias, key] : gpt_aliases) from.erase(std::string(alias));
  return merged(std::move(from), {{"architectures", {"GPT2LMHeadModel"}},
                                  {"model_type", "gpt2"},
                                  {"vocab_size", o.vocab},
                                  {"n_positions", o.context},
                                  {"n_embd", o.width},
                                  {"n_layer", o.layers},
                                  {"n_head", o.heads},
                                  {"activation_function", o.gelu == GeluForm::erf ? "gelu" : "gelu_new"},
                                  {"layer_norm_epsilon", o.norm_eps},
                                  {"resid_pdrop", o.dropout},
                                  {"attn_pdrop", o.dropout},
                                  {"embd_pdrop", o.embedding_dropout},
                                  {"tie_word_embeddings", o.tie_word_embeddings},
                                  {"torch_dtype", name_in_config(dtype)}});
}

json config_of(const LlamaOptions& o, DType dtype, json from) {
  json own = {{"architectures", {"LlamaForCausalLM"}},
              {"model_type", "llama"},
              {"vocab_size", o.vocab_size},
              {"hidden_size", o.hidden_size},
              {"intermediate_size", o.intermediate_size},
              {"num_hidden_layers", o.num_hidden_layers},
              {"num_attention_heads", o.num_attention_heads},
              {"num_key_value_heads", o.key_value_heads()},
              {"head_dim", o.head_width()},
              {"max_position_embeddings", o.max_position_embeddings},
              {"hidden_act", "silu"},
              {"rms_norm_eps", o.rms_norm_eps},
              {"rope_theta", o.rope_theta},
              {"attention_bias", o.attention_bias},
              {"mlp_bias", o.mlp_bias},
              {"tie_word_embeddings", o.tie_word_embeddings},
              {"torch_dtype", name_in_config(dtype)}};
  if (const RotaryScaling& s = o.rope_scaling; s.factor != 1)
    own["rope_scaling"] = {{"rope_type", "llama3"},
                           {"factor", s.factor},
                           {"low_freq_factor", s.low},
                           {"high_freq_factor", s.high},
                           {"original_max_position_embeddings", static_cast<std::int64_t>(s.original)}};
  return merged(std::move(from), own);
}

}  // namespace pretrained

GptOptions gpt_options(const FileSystem::Path& folder, FileSystem& files) {
  using namespace pretrained;
  Config c(folder, files, "gpt2");
  for (const auto& [alias, key] : gpt_aliases) c.rename(std::string(alias), std::string(key));
  GptOptions o;
  o.vocab = c.size("vocab_size", 50257, many);
  o.context = c.size("n_positions", 1024, many);
  o.width = c.size("n_embd", 768, wide);
  o.layers = c.size("n_layer", 12, deep);
  o.heads = c.size("n_head", 12, heads);
  c.only("n_inner", 4 * o.width);
  o.gelu = c.choice(
      "activation_function", GeluForm::tanh,
      {{"gelu_new", GeluForm::tanh}, {"gelu_pytorch_tanh", GeluForm::tanh}, {"gelu", GeluForm::erf}});
  o.norm_eps = c.positive("layer_norm_epsilon", 1e-5);
  o.dropout = c.dropout("resid_pdrop", 0.1);
  if (c.dropout("attn_pdrop", 0.1) != o.dropout)
    c.refuse("attn_pdrop", fmt::format("that of resid_pdrop, {}", o.dropout));
  o.embedding_dropout = c.dropout("embd_pdrop", 0.1);
  o.tie_word_embeddings = c.flag("tie_word_embeddings", true);
  c.only("scale_attn_weights", true);
  c.only("scale_attn_by_inverse_layer_idx", false);
  c.only("reorder_and_upcast_attn", false);
  c.only("add_cross_attention", false);
  quantization_of(c);
  o.tensor.dtype = dtype_of(c);
  return o;
}

LlamaOptions llama_options(const FileSystem::Path& folder, FileSystem& files) {
  using namespace pretrained;
  const Config c(folder, files, "llama");
  LlamaOptions o;
  o.vocab_size = c.size("vocab_size", 32000, many);
  o.hidden_size = c.size("hidden_size", 4096, wide);
  o.intermediate_size = c.size("intermediate_size", 11008, wide);
  o.num_hidden_layers = c.size("num_hidden_layers", 32, deep);
  o.num_attention_heads = c.size("num_attention_heads", 32, heads);
  o.num_key_value_heads = c.size("num_key_value_heads", heads);
  o.head_dim = c.size("head_dim", heads);
  o.max_position_embeddings = c.size("max_position_embeddings", 2048, many);
  o.rms_norm_eps = c.positive("rms_norm_eps", 1e-6);
  read_rotary(c, o);
  c.only("hidden_act", "silu");
  c.only("attention_dropout", 0.0);
  c.only("partial_rotary_factor", 1.0);
  c.only("rope_interleaved", false);
  o.attention_bias = c.flag("attention_bias", false);
  o.mlp_bias = c.flag("mlp_bias", false);
  o.tie_word_embeddings = c.flag("tie_word_embeddings", false);
  quantization_of(c);
  o.tensor.dtype = dtype_of(c);
  return o;
}

}  // namespace sherd::nn
