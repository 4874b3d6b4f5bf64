// Adapters in the format of PEFT: adapter_model.safetensors and adapter_config.json.
#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <map>
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

/// Rank and form of an adapter.
struct Common {
  std::int64_t rank;
  LoraForm form;
  bool operator==(const Common&) const = default;
};
Common common_of(const NamedLinear& l) { return {l.linear->lora->rank(), l.linear->lora->form}; }

/// Ranks and alphas of all layers but those that patterns name by their names or the ends of these.
struct Shared {
  Common common;
  std::map<std::string, std::int64_t> ranks{};
  std::map<std::string, double> alphas{};

  /// None where patterns of unlike values name the layer.
  std::optional<Common> of(const std::string& layer) const {
    const auto rank = value_of(ranks, layer, common.rank);
    const auto alpha = value_of(alphas, layer, common.form.alpha);
    if (!rank || !alpha) return {};
    Common own = common;
    own.rank = *rank, own.form.alpha = *alpha;
    return own;
  }

 private:
  template <class T>
  static std::optional<T> value_of(const std::map<std::string, T>& pattern, const std::string& layer,
                                   T usual) {
    std::optional<T> found;
    for (const auto& [name, value] : pattern) {
      if (!names(name, layer, false)) continue;
      if (found && *found != value) return {};
      found = value;
    }
    return found.value_or(usual);
  }
};

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

/// That of most of them, the first of these.
template <class Of>
auto usual(const std::vector<NamedLinear>& adapted, const Of& of) {
  return of(*std::ranges::max_element(adapted, {}, [&](const NamedLinear& l) {
    return std::ranges::count_if(adapted, [&](const NamedLinear& other) { return of(other) == of(l); });
  }));
}

Shared shared_by(const Module& model, const std::vector<NamedLinear>& adapted) {
  Shared shared{common_of(adapted[0])};
  shared.common.rank = usual(adapted, [](const NamedLinear& l) { return common_of(l).rank; });
  shared.common.form.alpha = usual(adapted, [](const NamedLinear& l) { return common_of(l).form.alpha; });
  for (const NamedLinear& l : adapted) {
    const Common own = common_of(l);
    if (own.rank != shared.common.rank) shared.ranks.emplace(stored_name(model, l), own.rank);
    if (own.form.alpha != shared.common.form.alpha)
      shared.alphas.emplace(stored_name(model, l), own.form.alpha);
  }
  for (const NamedLinear& l : adapted)
    check<StateError>(
        shared.of(stored_name(model, l)) == common_of(l),
        "save_lora: the adapters of '{}' and '{}' differ in what a folder has one of, dropout "
        "and scaling, or in rank or alpha under names of which one is the end of the other; give "
        "both the same",
        adapted[0].name, l.name);
  return shared;
}

json config_of(const Module& model, const std::vector<NamedLinear>& adapted, const SaveLoraOptions& options) {
  const Shared shared = shared_by(model, adapted);
  const Common& common = shared.common;
  json alphas = json::object();
  for (const auto& [name, alpha] : shared.alphas) alphas[name] = number(alpha);
  const bool is_gpt = dynamic_cast<const Gpt*>(&model) != nullptr,
             writes = is_gpt || dynamic_cast<const Llama*>(&model) != nullptr;
  const auto or_null = [](bool is, const std::string& text) { return is ? json(text) : json(nullptr); };
  return {{"alpha_pattern", alphas},
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
          {"rank_pattern", shared.ranks},
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
  Shared shared;
  std::vector<std::string> targets;
};
/// Of the model.
struct DescribedLayer {
  NamedLinear layer;
  Common common;
};

/// Refuses what would have the adapters compute something else.
void check_plain(const pretrained::Config& c) {
  for (const char* none :
       {"alora_invocation_tokens", "arrow_config", "corda_config", "eva_config", "exclude_modules",
        "layer_replication", "layers_pattern", "layers_to_transform", "lora_ga_config", "megatron_config",
        "modules_to_save", "target_parameters", "trainable_token_indices"})
    c.refuse_unless_none(none);
  for (const char* off : {"lora_bias", "use_bdlora", "use_dora", "use_qalora"}) c.only(off, false);
  c.only("loftq_config", json::object());
  for (const char* other :
       {"auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "fan_in_fan_out", "inference_mode",
        "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type"})
    c.pass_over(other);
  c.only("bias", "none");
}

/// By the names of layers, or the ends of these; PEFT takes expressions too.
template <class T, class F>
std::map<std::string, T> pattern_in(const pretrained::Config& c, const std::string& key, F&& value_in) {
  std::map<std::string, T> pattern;
  const std::optional<pretrained::Config> object = c.object(key);
  if (!object) return pattern;
  for (const std::string& name : object->keys()) {
    const bool plain = !name.empty() && std::ranges::all_of(name, [](unsigned char letter) {
      return std::isalnum(letter) != 0 || letter == '_' || letter == '.';
    });
    if (!plain) c.refuse(key, "names of layers, or the ends of these");
    pattern.emplace(name, value_in(*object, name));
  }
  return pattern;
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
  const auto rank = [](const pretrained::Config& in, const std::string& name) {
    in.need(name);
    return in.size(name, 8, pretrained::wide);
  };
  const auto alpha = [](const pretrained::Config& in, const std::string& name) {
    in.need(name);
    return in.positive(name, 8);
  };
  Described described{{{c.size("r", 8, pretrained::wide),
                        {c.positive("lora_alpha", 8), c.dropout("lora_dropout", 0),
                         c.flag("use_rslora", false) ? LoraScaling::by_root_of_rank : LoraScaling::by_rank}},
                       pattern_in<std::int64_t>(c, "rank_pattern", rank),
                       pattern_in<double>(c, "alpha_pattern", alpha)},
                      c.texts("target_modules", all_linear)};
  c.nothing_unknown();
  return described;
}

/// The layers that the file's targets name.
std::vector<DescribedLayer> described_in(const Module& model, const Described& described,
                                         const Path& folder) {
  const std::vector<std::string>& targets = described.targets;
  std::vector<DescribedLayer> layers;
  for (const NamedLinear& l : linears_in(model)) {
    const std::string name = stored_name(model, l);
    if (!std::ranges::any_of(targets, [&](const auto& t) { return names(t, name, l.is_head); })) continue;
    const std::optional<Common> own = described.shared.of(name);
    check<ValueError>(own.has_value(),
                      "load_lora: '{}': in rank_pattern or alpha_pattern two of unlike values name '{}'; one "
                      "of them is meant",
                      shown((folder / config_file).string(), 300), name);
    layers.push_back({l, *own});
  }
  check<ValueError>(!layers.empty(), "load_lora: '{}': target_modules ({}) name no Linear of the {}",
                    shown(folder.string(), 300), shown(fmt::format("{}", fmt::join(targets, ", ")), 300),
                    model.type_name());
  return layers;
}

/// StateError unless the model has adapters on just these layers, of their ranks and forms.
void check_same(const std::vector<NamedLinear>& adapted, const std::vector<DescribedLayer>& described,
                const Path& folder) {
  const bool alike =
      std::ranges::equal(adapted, described, [](const NamedLinear& own, const DescribedLayer& l) {
        return own.linear == l.layer.linear && common_of(own) == l.common;
      });
  check<StateError>(alike,
                    "load_lora: '{}': holds adapters of rank {} for {} layers, and the model has others, on "
                    "{} layers; remove_lora, or load into a model without",
                    shown(folder.string(), 300), described[0].common.rank, described.size(), adapted.size());
}

/// ValueError unless the file has just the tensors of these layers' adapters, in their shapes.
void check_tensors(const SafetensorsFile& file, const Module& model,
                   const std::vector<DescribedLayer>& layers, const Path& folder) {
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
  for (const auto& [l, common] : layers) {
    const auto [narrowing, widening] = stored_names(model, l);
    expect(narrowing, {common.rank, l.linear->weight.shape()[1]});
    expect(widening, {l.linear->weight.shape()[0], common.rank});
  }
  for (const TensorEntry& entry : file.entries())
    check<ValueError>(expected.contains(entry.name),
                      "load_lora: '{}': '{}' is no adapter's that target_modules name", where,
                      shown(entry.name));
}

/// Layers that are alike in one call.
void add_described(Module& model, std::vector<DescribedLayer> layers, std::optional<DType> dtype) {
  while (!layers.empty()) {
    const Common common = layers[0].common;
    LoraOptions options{common.rank,         common.form.alpha,         common.form.dropout,
                        common.form.scaling, {std::string(all_linear)}, dtype};
    std::vector<NamedLinear> alike;
    for (const DescribedLayer& l : layers)
      if (l.common == common) alike.push_back(l.layer);
    add_to(model, alike, options);
    std::erase_if(layers, [&](const DescribedLayer& l) { return l.common == common; });
  }
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
  const std::vector<lora::DescribedLayer> layers = lora::described_in(model, described, folder);
  const SafetensorsFile file(folder / lora::tensors_file, options.files);
  lora::check_tensors(file, model, layers, folder);
  for (const auto& [l, common] : layers)
    check<DeviceError>(!on_meta(l.linear->weight.object()),
                       "load_lora: '{}' is on meta, so there is no memory for its adapter; load the model "
                       "first",
                       l.name);
  std::vector<std::array<Tensor, 2>> values;
  for (const auto& [l, common] : layers) {
    const auto [narrowing, widening] = lora::stored_names(model, l);
    values.push_back({load_tensor(file, *file.find(narrowing)), load_tensor(file, *file.find(widening))});
  }
  if (const auto adapted = lora::adapted_in(model); !adapted.empty())
    lora::check_same(adapted, layers, folder);
  else
    lora::add_described(model, layers, options.dtype);
  const NoGrad guard;
  for (std::size_t l = 0; l < layers.size(); ++l)
    for (const std::size_t i : {0, 1})
      pretrained::give(lora::parameters_of(layers[l].layer)[i], values[l][i]);
}

}  // namespace sherd::nn
