// Adapters in the format of PEFT: adapter_model.safetensors and adapter_config.json.
#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "nn/config_file.h"
#include "nn/gpt.h"
#include "nn/llama.h"
#include "nn/lora.h"
#include "nn/lora_layers.h"
#include "nn/on_meta.h"
#include "nn/pretrained_parts.h"
#include "nn/state_file.h"
#include "runtime/context.h"
#include "runtime/io/durable.h"
#include "runtime/ops.h"

namespace sherd::nn {
namespace lora {
namespace {

using nlohmann::json;
using Path = FileSystem::Path;

constexpr std::string_view tensors_file = "adapter_model.safetensors", config_file = "adapter_config.json",
                           root = "base_model.model.";

/// What PEFT calls a layer: "model.layers.0.self_attn.q_proj".
std::string stored_name(const Module& model, const NamedLinear& layer) {
  constexpr std::string_view member = ".weight";
  const std::string name = pretrained::stored_name(model, layer.name + std::string(member));
  return name.substr(0, name.size() - member.size());
}

/// What PEFT calls the parameters of a layer's adapter, the narrowing one first.
std::array<std::string, 2> stored_names(const Module& model, const NamedLinear& layer) {
  const std::string name = stored_name(model, layer),
                    prefix = std::string(root) + name + (name.empty() ? "" : ".");
  return {prefix + "lora_A.weight", prefix + "lora_B.weight"};
}
std::array<Parameter, 2> parameters_of(const NamedLinear& layer) {
  return {layer.linear->lora->lora_A.weight.object(), layer.linear->lora->lora_B.weight.object()};
}

/// Rank and form that all adapters of a model have.
struct Common {
  std::int64_t rank;
  LoraForm form;
  bool operator==(const Common&) const = default;
};
Common common_of(const std::vector<NamedLinear>& adapted, std::string_view call) {
  const auto of = [](const NamedLinear& l) { return Common{l.linear->lora->rank(), l.linear->lora->form}; };
  for (const NamedLinear& l : adapted)
    check<StateError>(of(l) == of(adapted[0]),
                      "{}: the adapters of '{}' and '{}' differ in rank, alpha, dropout or scaling, and a "
                      "folder has one of each; give all layers the same",
                      call, adapted[0].name, l.name);
  return of(adapted[0]);
}

// ---- saving ----

/// The last words of the layers' names, as far as these name no other layer; else whole names.
std::vector<std::string> targets_of(const Module& model, const std::vector<NamedLinear>& adapted) {
  std::set<std::string> words, whole;
  for (const NamedLinear& l : adapted) {
    const std::string name = stored_name(model, l);
    whole.insert(name);
    words.insert(name.substr(name.rfind('.') + 1));
  }
  for (const NamedLinear& l : linears_in(model)) {
    const std::string name = stored_name(model, l);
    if (!whole.contains(name) && words.contains(name.substr(name.rfind('.') + 1)))
      return {whole.begin(), whole.end()};
  }
  return {words.begin(), words.end()};
}

/// As PEFT writes it: whole where it is.
json number(double x) {
  return x < 1e15 && x == std::floor(x) ? json(static_cast<std::int64_t>(x)) : json(x);
}

json config_of(const Module& model, const std::vector<NamedLinear>& adapted, const SaveLoraOptions& options) {
  const Common common = common_of(adapted, "save_lora");
  const bool is_gpt = dynamic_cast<const Gpt*>(&model) != nullptr,
             writes = is_gpt || dynamic_cast<const Llama*>(&model) != nullptr;
  const auto or_null = [](bool is, const std::string& text) { return is ? json(text) : json(nullptr); };
  return {{"alpha_pattern", json::object()},
          {"base_model_name_or_path", or_null(!options.base_model.empty(), options.base_model)},
          {"bias", "none"},
          {"fan_in_fan_out", is_gpt},
          {"inference_mode", true},
          {"init_lora_weights", true},
          {"lora_alpha", number(common.form.alpha)},
          {"lora_dropout", common.form.dropout},
          {"modules_to_save", nullptr},
          {"peft_type", "LORA"},
          {"r", common.rank},
          {"rank_pattern", json::object()},
          {"target_modules", targets_of(model, adapted)},
          {"task_type", or_null(writes, "CAUSAL_LM")},
          {"use_dora", false},
          {"use_rslora", common.form.scaling == LoraScaling::by_root_of_rank}};
}

/// FileError where the folder that is replaced holds something that is not written anew.
void check_replaceable(const Path& folder, FileSystem& files) {
  if (!files.is_directory(folder)) return;
  for (const std::string& name : files.list(folder))
    check<FileError>(name == tensors_file || name == config_file,
                     "save_lora: '{}': holds '{}', which replacing the folder would remove; name another "
                     "folder",
                     shown(folder.string(), 300), shown(name));
}

// ---- loading ----

/// What adapter_config.json says.
struct Described {
  Common common;
  std::vector<std::string> targets;
};

/// Refuses what would have the adapters compute something else.
void check_plain(const pretrained::Config& c) {
  for (const char* none :
       {"alora_invocation_tokens", "arrow_config", "corda_config", "eva_config", "exclude_modules",
        "layer_replication", "layers_pattern", "layers_to_transform", "lora_ga_config", "megatron_config",
        "modules_to_save", "target_parameters", "trainable_token_indices"})
    c.refuse_unless_none(none);
  for (const char* off : {"lora_bias", "use_bdlora", "use_dora", "use_qalora"}) c.only(off, false);
  for (const char* empty : {"alpha_pattern", "loftq_config", "rank_pattern"}) c.only(empty, json::object());
  for (const char* other :
       {"auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "fan_in_fan_out", "inference_mode",
        "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type"})
    c.pass_over(other);
  c.only("bias", "none");
}

Described read_config(const Path& folder, FileSystem& files) {
  const Path file = folder / config_file;
  const json object = pretrained::read_object(file, files);
  const pretrained::Config c(shown(file.string(), 300), object);
  for (const char* key : {"peft_type", "r", "lora_alpha", "target_modules"}) c.need(key);
  c.only("peft_type", "LORA");
  check_plain(c);
  // Other ways to start change the frozen weights too, and so mean another base.
  if (!object.value("init_lora_weights", json(true)).is_boolean()) c.only("init_lora_weights", "gaussian");
  c.pass_over("init_lora_weights");
  Described described{{c.size("r", 8, pretrained::wide),
                       {c.positive("lora_alpha", 8), c.dropout("lora_dropout", 0),
                        c.flag("use_rslora", false) ? LoraScaling::by_root_of_rank : LoraScaling::by_rank}},
                      c.texts("target_modules", all_linear)};
  c.nothing_unknown();
  return described;
}

/// The layers that the file's targets name.
std::vector<NamedLinear> described_in(const Module& model, const std::vector<std::string>& targets,
                                      const Path& folder) {
  std::vector<NamedLinear> layers = linears_in(model);
  std::erase_if(layers, [&](const NamedLinear& l) {
    const std::string name = stored_name(model, l);
    return std::ranges::none_of(targets, [&](const auto& t) { return names(t, name, l.is_head); });
  });
  check<ValueError>(!layers.empty(), "load_lora: '{}': target_modules ({}) name no Linear of the {}",
                    shown(folder.string(), 300), shown(fmt::format("{}", fmt::join(targets, ", ")), 300),
                    model.type_name());
  return layers;
}

/// StateError unless the model has adapters on just these layers, of that rank and form.
void check_same(const std::vector<NamedLinear>& adapted, const std::vector<NamedLinear>& described,
                const Common& common, const Path& folder) {
  const bool alike = std::ranges::equal(adapted, described, {}, &NamedLinear::linear, &NamedLinear::linear) &&
                     common_of(adapted, "load_lora") == common;
  check<StateError>(alike,
                    "load_lora: '{}': holds adapters of rank {} for {} layers, and the model has others, on "
                    "{} layers; remove_lora, or load into a model without",
                    shown(folder.string(), 300), common.rank, described.size(), adapted.size());
}

/// ValueError unless the file has just the tensors of these layers' adapters, in their shapes.
void check_tensors(const SafetensorsFile& file, const Module& model, const std::vector<NamedLinear>& layers,
                   std::int64_t rank, const Path& folder) {
  const std::string where = shown((folder / tensors_file).string(), 300);
  std::set<std::string, std::less<>> expected;
  const auto expect = [&](const std::string& name, std::vector<std::int64_t> shape) {
    const TensorEntry* entry = file.find(name);
    check<ValueError>(entry != nullptr, "load_lora: '{}': lacks '{}', which target_modules ask for", where,
                      name);
    check<ValueError>(entry->shape == shape && is_floating(file.dtype_of(*entry)),
                      "load_lora: '{}': '{}' is {} of shape [{}], the model takes floats of shape [{}]",
                      where, name, entry->dtype, fmt::join(entry->shape, ", "), fmt::join(shape, ", "));
    expected.insert(name);
  };
  for (const NamedLinear& l : layers) {
    const auto [narrowing, widening] = stored_names(model, l);
    expect(narrowing, {rank, l.linear->weight.shape()[1]});
    expect(widening, {l.linear->weight.shape()[0], rank});
  }
  for (const TensorEntry& entry : file.entries())
    check<ValueError>(expected.contains(entry.name),
                      "load_lora: '{}': '{}' is no adapter's that target_modules name", where,
                      shown(entry.name));
}

/// One target a layer, by its whole name.
void add_described(Module& model, const Described& described, const std::vector<NamedLinear>& layers,
                   std::optional<DType> dtype) {
  const auto& [alpha, dropout, scaling] = described.common.form;
  LoraOptions options{described.common.rank, alpha, dropout, scaling, {}, dtype};
  for (const NamedLinear& l : layers) options.targets.push_back(l.name);
  add_lora(model, options);
}

}  // namespace
}  // namespace lora

void save_lora(const Module& model, const FileSystem::Path& folder, const SaveLoraOptions& options) {
  const std::vector<lora::NamedLinear> adapted = lora::adapted_in(model);
  check<StateError>(!adapted.empty(), "save_lora: the {} has no adapters; add_lora gives it some",
                    model.type_name());
  StateDict state;
  for (const lora::NamedLinear& l : adapted)
    for (const std::size_t i : {0, 1}) {
      const std::string name = lora::stored_names(model, l)[i];
      state.emplace_back(name, pretrained::whole_of(lora::parameters_of(l)[i], name, "save_lora"));
    }
  const std::string config =
      lora::config_of(model, adapted, options).dump(2, ' ', false, nlohmann::json::error_handler_t::replace) +
      "\n";
  lora::check_replaceable(folder, options.files);
  write_directory_durably(
      folder,
      [&](DirectoryWriter& writer) {
        writer.add(lora::tensors_file,
                   [&](OutputFile& file) { write_state(file, state, {{"format", "pt"}}); });
        writer.add(lora::config_file, [&](OutputFile& file) { file.write(config); });
      },
      options.files);
}

void load_lora(Module& model, const FileSystem::Path& folder, const LoadLoraOptions& options) {
  const lora::Described described = lora::read_config(folder, options.files);
  const std::vector<lora::NamedLinear> layers = lora::described_in(model, described.targets, folder);
  const SafetensorsFile file(folder / lora::tensors_file, options.files);
  lora::check_tensors(file, model, layers, described.common.rank, folder);
  for (const lora::NamedLinear& l : layers)
    check<DeviceError>(!on_meta(l.linear->weight.object()),
                       "load_lora: '{}' is on meta, so there is no memory for its adapter; load the model "
                       "first",
                       l.name);
  std::vector<std::array<Tensor, 2>> values;
  for (const lora::NamedLinear& l : layers) {
    const auto [narrowing, widening] = lora::stored_names(model, l);
    values.push_back({load_tensor(file, *file.find(narrowing)), load_tensor(file, *file.find(widening))});
  }
  if (const auto adapted = lora::adapted_in(model); !adapted.empty())
    lora::check_same(adapted, layers, described.common, folder);
  else
    lora::add_described(model, described, layers, options.dtype);
  const NoGrad guard;
  for (std::size_t l = 0; l < layers.size(); ++l)
    for (const std::size_t i : {0, 1}) pretrained::give(lora::parameters_of(layers[l])[i], values[l][i]);
}

}  // namespace sherd::nn
