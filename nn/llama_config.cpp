// config.json of the families that Llama's module has.
#include <array>
#include <cmath>

#include "nn/config_file.h"
#include "nn/pretrained.h"

namespace sherd::nn {
namespace pretrained {
namespace {

/// The keys of an object of rotary settings, by its type.
std::set<std::string> rotary_keys(std::optional<RotaryKind> kind) {
  std::set<std::string> keys = {"rope_type", "type", "rope_theta", "partial_rotary_factor"};
  if (!kind) return keys;
  keys.insert("factor");
  if (*kind == RotaryKind::llama3)
    keys.insert({"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"});
  if (*kind == RotaryKind::yarn)
    keys.insert({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
                 "original_max_position_embeddings", "truncate"});
  return keys;
}

const std::vector<std::pair<std::string_view, std::optional<RotaryKind>>> rotary_types = {
    {"default", {}},
    {"linear", RotaryKind::linear},
    {"dynamic", RotaryKind::dynamic},
    {"llama3", RotaryKind::llama3},
    {"yarn", RotaryKind::yarn}};
const decltype(rotary_types) plain_rotary = {{"default", {}}};

/// What yarn multiplies by where no `attention_factor` is given (Peng et al., 2023).
double yarn_amplitude(const Config& rope, double factor) {
  const auto amplitude = [&](double share) { return factor <= 1 ? 1 : 0.1 * share * std::log(factor) + 1; };
  const std::optional<double> share = rope.positive_or_none("mscale", {}),
                              of_all = rope.positive_or_none("mscale_all_dim", {});
  return share && of_all ? amplitude(*share) / amplitude(*of_all) : amplitude(1);
}

RotaryScaling read_scaling(const Config& rope, RotaryKind kind, const LlamaOptions& o) {
  RotaryScaling s{.factor = rope.positive("factor", 1), .kind = kind};
  rope.need("factor");
  if (kind == RotaryKind::dynamic && s.factor < 1) rope.refuse("factor", "a number from 1");
  std::string_view low = "low_freq_factor", high = "high_freq_factor";
  if (kind == RotaryKind::llama3)
    for (const std::string_view needed : {low, high, std::string_view("original_max_position_embeddings")})
      rope.need(std::string(needed));
  if (kind == RotaryKind::yarn) {
    s.low = 1, s.high = 32;
    low = "beta_slow", high = "beta_fast";
    s.amplitude = rope.positive("attention_factor", yarn_amplitude(rope, s.factor));
    if (!rope.flag("truncate", true)) s.kind = RotaryKind::yarn_fractional;
  }
  if (kind == RotaryKind::linear || kind == RotaryKind::dynamic) return s;
  s.low = rope.positive(std::string(low), s.low), s.high = rope.positive(std::string(high), s.high);
  s.original =
      rope.positive("original_max_position_embeddings", static_cast<double>(o.max_position_embeddings));
  if (s.high <= s.low) rope.refuse(std::string(high), fmt::format("above {}, {}", low, s.low));
  return s;
}

/// One object of rotary settings.
void read_rotary(const Config& rope, LlamaOptions& o) {
  const auto& types = o.family == LlamaFamily::phi3 ? plain_rotary : rotary_types;
  const std::optional<RotaryKind> kind = rope.choice("rope_type", rope.choice("type", {}, types), types);
  rope.no_others(rotary_keys(kind));
  o.rope_theta = rope.positive("rope_theta", o.rope_theta);
  if (o.family == LlamaFamily::phi3)
    o.partial_rotary_factor = rope.positive("partial_rotary_factor", o.partial_rotary_factor);
  else
    rope.only("partial_rotary_factor", 1.0);
  if (kind) o.rope_scaling = read_scaling(rope, *kind, o);
}

/// The same of one object, for Gemma 3 one for each type of layer.
void read_rotary_object(const Config& rope, LlamaOptions& o) {
  const bool by_layer = o.family == LlamaFamily::gemma3;
  const auto full = by_layer ? rope.object("full_attention") : std::nullopt;
  const auto local = by_layer ? rope.object("sliding_attention") : std::nullopt;
  if (!full && !local) return read_rotary(rope, o);
  rope.no_others({"full_attention", "sliding_attention"});
  if (full) read_rotary(*full, o);
  if (!local) return;
  local->choice("rope_type", local->choice("type", {}, plain_rotary), plain_rotary);
  local->no_others(rotary_keys({}));
  local->only("partial_rotary_factor", 1.0);
  o.rope_local_base_freq = local->positive("rope_theta", *o.rope_local_base_freq);
}

bool are_alike(const LlamaOptions& a, const LlamaOptions& b) {
  return a.rope_theta == b.rope_theta && a.rope_scaling == b.rope_scaling &&
         a.partial_rotary_factor == b.partial_rotary_factor &&
         a.rope_local_base_freq == b.rope_local_base_freq;
}

/// `rope_parameters`, or as they were before, `rope_scaling` beside `rope_theta`.
void read_rotary_of(const Config& c, LlamaOptions& o) {
  o.rope_theta = c.positive("rope_theta", o.rope_theta);
  if (o.family == LlamaFamily::gemma3)
    o.rope_local_base_freq = c.positive("rope_local_base_freq", *o.rope_local_base_freq);
  o.partial_rotary_factor = c.positive("partial_rotary_factor", 1);
  if (o.family != LlamaFamily::phi3) c.only("partial_rotary_factor", 1.0);
  std::optional<LlamaOptions> said;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const std::optional<Config> rope = c.object(key);
    if (!rope) continue;
    LlamaOptions here = o;
    read_rotary_object(*rope, here);
    if (said && !are_alike(*said, here))
      c.refuse(key, "what rope_scaling beside it says, or none of the two");
    said = here;
  }
  if (said) o = *said;
}

const std::vector<std::pair<std::string_view, Reach>> reaches = {{"full_attention", Reach::all},
                                                                 {"sliding_attention", Reach::window}};

/// `layer_types`, or a rule by the number of a layer.
void read_layer_types(const Config& c, LlamaOptions& o, auto&& has_window) {
  o.layer_types = c.choices("layer_types", reaches);
  if (o.layer_types.empty())
    for (std::int64_t i = 0; i < o.num_hidden_layers; ++i)
      o.layer_types.push_back(has_window(i) ? Reach::window : Reach::all);
  const auto layers = static_cast<std::size_t>(o.num_hidden_layers);
  if (o.layer_types.size() != layers) c.refuse("layer_types", fmt::format("{} entries, one a layer", layers));
}

auto by_pattern(const LlamaOptions& o) {
  return [every = o.sliding_window_pattern](std::int64_t layer) { return (layer + 1) % every != 0; };
}

void read_llama(const Config& c, LlamaOptions& o) {
  if (c.flag("attention_bias", false)) o.attention_bias = AttentionBias::all;
  o.mlp_bias = c.flag("mlp_bias", false);
}
void read_window(const Config& c, LlamaOptions& o) {
  o.sliding_window = c.size_or_none("sliding_window", o.sliding_window, many);
}
void read_qwen(const Config& c, LlamaOptions& o) {
  constexpr std::int64_t window = 4096, first_layers = 28;  // defaults
  const auto given = c.size_or_none("sliding_window", window, many);
  const std::int64_t from = c.size_from_zero("max_window_layers", first_layers, deep);
  if (c.flag("use_sliding_window", false)) o.sliding_window = given;
  read_layer_types(c, o, [&](std::int64_t layer) { return o.sliding_window && layer >= from; });
}
void read_qwen3(const Config& c, LlamaOptions& o) {
  read_qwen(c, o);
  if (c.flag("attention_bias", false)) o.attention_bias = AttentionBias::all;
}
void read_gemma(const Config& c, LlamaOptions& o) {
  read_window(c, o);
  if (o.sliding_window) c.only("sliding_window_size", *o.sliding_window);
  if (c.flag("attention_bias", false)) o.attention_bias = AttentionBias::all;
  o.query_pre_attn_scalar = c.positive("query_pre_attn_scalar", *o.query_pre_attn_scalar);
  o.final_logit_softcapping = c.positive_or_none("final_logit_softcapping", o.final_logit_softcapping);
  c.only("use_bidirectional_attention", false);
  c.pass_over("hidden_act");  // hidden_activation is what counts
}
void read_gemma2(const Config& c, LlamaOptions& o) {
  read_gemma(c, o);
  o.attn_logit_softcapping = c.positive_or_none("attn_logit_softcapping", o.attn_logit_softcapping);
  read_layer_types(c, o, by_pattern(o));
}
void read_gemma3(const Config& c, LlamaOptions& o) {
  read_gemma(c, o);
  c.refuse_unless_none("attn_logit_softcapping");  // implementations differ in whether it counts
  o.sliding_window_pattern = c.size("sliding_window_pattern",
                                    c.size("_sliding_window_pattern", o.sliding_window_pattern, deep), deep);
  read_layer_types(c, o, by_pattern(o));
}
void read_phi3(const Config& c, LlamaOptions& o) {
  read_window(c, o);
  c.only("resid_pdrop", 0.0);
  c.only("embd_pdrop", 0.0);
  c.pass_over("original_max_position_embeddings");  // counts for longrope alone
}

json layer_types_of(const LlamaOptions& o) {
  json types = json::array();
  for (std::int64_t i = 0; i < o.num_hidden_layers; ++i)
    types.push_back(reaches[o.window_of(i) ? 1 : 0].first);
  return types;
}
/// An integer, which transformers wants here, if it is one.
json whole_if(double x) {
  return x == std::floor(x) && x < 1e15 ? json(static_cast<std::int64_t>(x)) : json(x);
}
json number_or_null(const auto& value) { return value ? json(*value) : json(); }

void write_llama(const LlamaOptions& o, json& own) {
  own["attention_bias"] = o.attention_bias == AttentionBias::all;
  own["mlp_bias"] = o.mlp_bias;
}
void write_window(const LlamaOptions& o, json& own) {
  own["sliding_window"] = number_or_null(o.sliding_window);
}
void write_qwen(const LlamaOptions& o, json& own) {
  own["use_sliding_window"] = o.sliding_window.has_value();
  write_window(o, own);
  own["layer_types"] = layer_types_of(o);
}
void write_qwen3(const LlamaOptions& o, json& own) {
  write_qwen(o, own);
  own["attention_bias"] = o.attention_bias == AttentionBias::all;
}
void write_gemma(const LlamaOptions& o, json& own) {
  write_window(o, own);
  own["attention_bias"] = o.attention_bias == AttentionBias::all;
  own["query_pre_attn_scalar"] =
      whole_if(o.query_pre_attn_scalar.value_or(static_cast<double>(o.head_width())));
  own["final_logit_softcapping"] = number_or_null(o.final_logit_softcapping);
  own["layer_types"] = layer_types_of(o);
  own["use_bidirectional_attention"] = false;
}
void write_gemma2(const LlamaOptions& o, json& own) {
  write_gemma(o, own);
  own["attn_logit_softcapping"] = number_or_null(o.attn_logit_softcapping);
}
void write_gemma3(const LlamaOptions& o, json& own) {
  write_gemma(o, own);
  own["rope_local_base_freq"] = o.rope_local_base_freq.value_or(o.rope_theta);
}
void write_phi3(const LlamaOptions& o, json& own) {
  write_window(o, own);
  own["partial_rotary_factor"] = o.partial_rotary_factor;
}

/// A family's words, and what config.json says of it beside what all of them have.
struct Family {
  LlamaFamily family;
  std::string_view model_type, architecture, activation;
  void (*read)(const Config& c, LlamaOptions& o);
  void (*write)(const LlamaOptions& o, json& own);
};
constexpr auto families = std::to_array<Family>(
    {{LlamaFamily::llama, "llama", "LlamaForCausalLM", "hidden_act", read_llama, write_llama},
     {LlamaFamily::mistral, "mistral", "MistralForCausalLM", "hidden_act", read_window, write_window},
     {LlamaFamily::qwen2, "qwen2", "Qwen2ForCausalLM", "hidden_act", read_qwen, write_qwen},
     {LlamaFamily::qwen3, "qwen3", "Qwen3ForCausalLM", "hidden_act", read_qwen3, write_qwen3},
     {LlamaFamily::gemma2, "gemma2", "Gemma2ForCausalLM", "hidden_activation", read_gemma2, write_gemma2},
     {LlamaFamily::gemma3, "gemma3_text", "Gemma3ForCausalLM", "hidden_activation", read_gemma3,
      write_gemma3},
     {LlamaFamily::phi3, "phi3", "Phi3ForCausalLM", "hidden_act", read_phi3, write_phi3}});

const Family& family_of(LlamaFamily family) { return *std::ranges::find(families, family, &Family::family); }

const std::vector<std::pair<std::string_view, Gate>> gates = {{"silu", Gate::silu},
                                                              {"gelu_pytorch_tanh", Gate::gelu_tanh},
                                                              {"gelu_new", Gate::gelu_tanh},
                                                              {"gelu", Gate::gelu}};

/// What the config says of a Llama.
LlamaOptions llama_options_of(const Config& c) {
  std::vector<std::pair<std::string_view, LlamaFamily>> types;
  for (const Family& family : families) types.emplace_back(family.model_type, family.family);
  LlamaOptions o = llama_options(c.choice("model_type", LlamaFamily::llama, types));
  const Family& family = family_of(o.family);
  o.vocab_size = c.size("vocab_size", o.vocab_size, many);
  o.hidden_size = c.size("hidden_size", o.hidden_size, wide);
  o.intermediate_size = c.size("intermediate_size", o.intermediate_size, wide);
  o.num_hidden_layers = c.size("num_hidden_layers", o.num_hidden_layers, deep);
  o.num_attention_heads = c.size("num_attention_heads", o.num_attention_heads, heads);
  o.num_key_value_heads = c.size_or_none("num_key_value_heads", o.num_key_value_heads, heads);
  o.head_dim = c.size_or_none("head_dim", o.head_dim, heads);
  o.max_position_embeddings = c.size("max_position_embeddings", o.max_position_embeddings, many);
  o.rms_norm_eps = c.positive("rms_norm_eps", o.rms_norm_eps);
  o.hidden_act = c.choice(std::string(family.activation), o.hidden_act, gates);
  o.tie_word_embeddings = c.flag("tie_word_embeddings", o.tie_word_embeddings);
  c.only("attention_dropout", 0.0);
  read_rotary_of(c, o);
  family.read(c, o);
  check_plain_decoder(c);
  quantization_of(c);
  o.tensor.dtype = dtype_of(c);
  c.nothing_unknown();
  return o;
}

/// What decides a model's results, by the names of options.
std::vector<std::pair<std::string_view, std::string>> settings_of(const LlamaOptions& o) {
  const RotaryScaling& s = o.rope_scaling;
  const auto word = [](auto value, std::initializer_list<const char*> words) {
    return std::string(words.begin()[static_cast<int>(value)]);
  };
  const auto number = [](const auto& value) { return value ? fmt::format("{}", *value) : "none"; };
  std::vector<std::pair<std::string_view, std::string>> all = {
      {"vocab_size", fmt::format("{}", o.vocab_size)},
      {"hidden_size", fmt::format("{}", o.hidden_size)},
      {"intermediate_size", fmt::format("{}", o.intermediate_size)},
      {"num_hidden_layers", fmt::format("{}", o.num_hidden_layers)},
      {"num_attention_heads", fmt::format("{}", o.num_attention_heads)},
      {"num_key_value_heads", fmt::format("{}", o.key_value_heads())},
      {"head_dim", fmt::format("{}", o.head_width())},
      {"max_position_embeddings", fmt::format("{}", o.max_position_embeddings)},
      {"rms_norm_eps", fmt::format("{}", o.rms_norm_eps)},
      {"rope_theta", fmt::format("{}", o.rope_theta)},
      {"rope_scaling",
       fmt::format("{} {} {} {} {} {}",
                   word(s.kind, {"linear", "dynamic", "llama3", "yarn", "yarn_fractional"}), s.factor, s.low,
                   s.high, s.kind == RotaryKind::dynamic ? 0 : s.original, s.amplitude)},
      {"tie_word_embeddings", fmt::format("{}", o.tie_word_embeddings)},
      {"attention_bias", word(o.attention_bias, {"none", "inputs", "all"})},
      {"mlp_bias", fmt::format("{}", o.mlp_bias)},
      {"hidden_act", word(o.hidden_act, {"silu", "gelu", "gelu_tanh"})},
      {"norms", word(o.norms, {"before", "before_and_behind"})},
      {"gain", word(o.gain, {"weight", "one_plus_weight"})},
      {"query_key_norms", fmt::format("{}", o.query_key_norms)},
      {"projections", word(o.projections, {"apart", "fused"})},
      {"embedding_scale", word(o.embedding_scale, {"one", "root_of_width"})},
      {"query_pre_attn_scalar",
       fmt::format("{}", o.query_pre_attn_scalar.value_or(static_cast<double>(o.head_width())))},
      {"attn_logit_softcapping", number(o.attn_logit_softcapping)},
      {"final_logit_softcapping", number(o.final_logit_softcapping)},
      {"partial_rotary_factor", fmt::format("{}", o.partial_rotary_factor)}};
  std::string windows, bases;
  for (std::int64_t i = 0; i < o.num_hidden_layers; ++i) {
    windows += number(o.window_of(i)) + " ";
    bases += fmt::format("{} ", o.rotary_of(i).base);
  }
  all.emplace_back("sliding_window and layer_types", windows);
  all.emplace_back("rope_local_base_freq", bases);
  return all;
}

/// Refuses to write options that a family's config.json has no words for: it would read as another model, or
/// not at all.
void check_says(const json& config, const LlamaOptions& o) {
  const std::string_view family = family_of(o.family).model_type;
  const std::string text = config.dump(-1, ' ', false, json::error_handler_t::replace);
  const auto wanted = settings_of(o);
  auto said = wanted;
  try {
    said = settings_of(llama_options_of(Config("config.json", json::parse(text))));
  } catch (const ValueError& error) {
    fail<StateError>("save_pretrained: what would be written of the family {} would not be read: {}", family,
                     error.what());
  }
  for (std::size_t i = 0; i < wanted.size(); ++i)
    check<StateError>(wanted[i].second == said[i].second,
                      "save_pretrained: {} is {}, for which a config.json of the family {} has no words; it "
                      "reads as {}; give the options another family",
                      wanted[i].first, wanted[i].second, family, said[i].second);
}

json scaling_in_config(const RotaryScaling& s) {
  const RotaryKind kind = s.kind == RotaryKind::yarn_fractional ? RotaryKind::yarn : s.kind;
  const auto type =
      std::ranges::find(rotary_types, std::optional(kind), [](const auto& t) { return t.second; });
  json scaling = {{"rope_type", type->first}, {"factor", s.factor}};
  if (kind == RotaryKind::llama3) scaling.update({{"low_freq_factor", s.low}, {"high_freq_factor", s.high}});
  if (kind == RotaryKind::yarn)
    scaling.update({{"beta_slow", s.low}, {"beta_fast", s.high}, {"attention_factor", s.amplitude}});
  if (kind == RotaryKind::llama3 || kind == RotaryKind::yarn)
    scaling["original_max_position_embeddings"] = whole_if(s.original);
  if (s.kind == RotaryKind::yarn_fractional) scaling["truncate"] = false;
  return scaling;
}

}  // namespace

json config_of(const LlamaOptions& o, DType dtype, json from) {
  const Family& family = family_of(o.family);
  json own = {
      {"architectures", {family.architecture}},
      {"model_type", family.model_type},
      {"vocab_size", o.vocab_size},
      {"hidden_size", o.hidden_size},
      {"intermediate_size", o.intermediate_size},
      {"num_hidden_layers", o.num_hidden_layers},
      {"num_attention_heads", o.num_attention_heads},
      {"num_key_value_heads", o.key_value_heads()},
      {"head_dim", o.head_width()},
      {"max_position_embeddings", o.max_position_embeddings},
      {family.activation, std::ranges::find(gates, o.hidden_act, [](auto& g) { return g.second; })->first},
      {"rms_norm_eps", o.rms_norm_eps},
      {"rope_theta", o.rope_theta},
      {"tie_word_embeddings", o.tie_word_embeddings},
      {"torch_dtype", name_in_config(dtype)}};
  if (o.rope_scaling != RotaryScaling{}) own["rope_scaling"] = scaling_in_config(o.rope_scaling);
  family.write(o, own);
  if (!from.contains("pad_token_id")) own["pad_token_id"] = nullptr;  // else transformers has the family's
  json whole = merged(std::move(from), own);
  check_says(whole, o);
  return whole;
}

}  // namespace pretrained

LlamaOptions llama_options(const FileSystem::Path& folder, FileSystem& files) {
  return pretrained::llama_options_of(pretrained::Config(folder, files));
}

}  // namespace sherd::nn
