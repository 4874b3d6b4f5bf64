#include "nn/pretrained_config.h"

#include <array>

#include "nn/config_file.h"
#include "nn/pretrained.h"
#include "runtime/io/foreign.h"

namespace sherd::nn {
namespace pretrained {

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

constexpr std::int64_t fp8_block = 128;

/// Words of other models that transformers takes for GPT-2's (`attribute_map`).
constexpr std::array<std::pair<std::string_view, std::string_view>, 4> gpt_aliases = {
    {{"hidden_size", "n_embd"},
     {"max_position_embeddings", "n_positions"},
     {"num_attention_heads", "n_head"},
     {"num_hidden_layers", "n_layer"}}};

const std::vector<std::pair<std::string_view, DType>> dtypes = {
    {"float32", f32}, {"bfloat16", bf16}, {"float16", f16}, {"float64", f64}};

}  // namespace

bool Config::meaningless(std::string_view key) {
  static constexpr std::string_view keys =  // between commas
      ",_attn_implementation,_attn_implementation_autoset,_commit_hash,_name_or_path,architectures,"
      "attn_implementation,auto_map,bad_words_ids,begin_suppress_tokens,bos_token_id,"
      "cache_implementation,chunk_size_feed_forward,decoder_start_token_id,diversity_penalty,do_sample,"
      "early_stopping,encoder_no_repeat_ngram_size,eos_token_id,exponential_decay_length_penalty,"
      "finetuning_task,forced_bos_token_id,forced_eos_token_id,id2label,initializer_range,is_decoder,"
      "is_llama_config,label2id,length_penalty,max_length,min_length,n_ctx,no_repeat_ngram_size,"
      "num_beam_groups,num_beams,num_return_sequences,output_attentions,output_hidden_states,"
      "output_scores,pad_token_id,prefix,pretraining_tp,problem_type,remove_invalid_values,"
      "repetition_penalty,return_dict,return_dict_in_generate,sep_token_id,summary_activation,"
      "summary_first_dropout,summary_proj_to_labels,summary_type,summary_use_proj,suppress_tokens,"
      "task_specific_params,temperature,tf_legacy_loss,tie_encoder_decoder,tokenizer_class,top_k,top_p,"
      "torchscript,transformers.js_config,transformers_version,typical_p,unsloth_fixed,unsloth_version,"
      "use_bfloat16,use_cache,";
  return key.find(',') == std::string_view::npos &&
         keys.find(fmt::format(",{},", key)) != std::string_view::npos;
}

void check_plain_decoder(const Config& c) {
  for (const char* part : {"add_cross_attention", "attention_bias", "is_encoder_decoder", "lm_head_bias",
                           "mlp_bias", "rope_interleaved", "use_mrope"})
    c.only_unless_asked(part, false);
  c.only("pruned_heads", json::object());
}

DType dtype_of(const Config& c) { return c.choice("dtype", c.choice("torch_dtype", f32, dtypes), dtypes); }

std::string_view name_in_config(DType dtype) {
  for (const auto& [name, value] : dtypes)
    if (value == dtype) return name;
  fail<InternalError>("pretrained: no name for parameters of {}", name_of(dtype));
}

std::optional<Config> quantization_of(const Config& c) {
  const std::optional<Config> q = c.object("quantization_config");
  if (q) q->choice("quant_method", true, {{"fp8", true}, {"compressed-tensors", true}});
  return q;
}

json merged(json from, const json& own) {
  for (const char* stale :
       {"dtype", "n_ctx", "n_inner", "rope_parameters", "rope_scaling", "quantization_config", "head_dim",
        "transformers_version", "layer_types", "partial_rotary_factor", "_sliding_window_pattern",
        "sliding_window_pattern", "sliding_window_size"})
    from.erase(stale);
  from.update(own);
  return from;
}

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

}  // namespace pretrained

GptOptions gpt_options(const FileSystem::Path& folder, FileSystem& files) {
  using namespace pretrained;
  Config c(folder, files);
  c.only("model_type", "gpt2");
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
  check_plain_decoder(c);
  quantization_of(c);
  o.tensor.dtype = dtype_of(c);
  c.nothing_unknown();
  return o;
}

}  // namespace sherd::nn
