// LoRA (Hu et al., 2021): a frozen model whose linear layers learn a low-rank addition, saved alone in the
// format of Hugging Face's PEFT.
//
//   nn::Llama model = nn::load_llama("TinyLlama-1.1B", bf16);
//   nn::add_lora(model, {.rank = 16, .alpha = 32, .targets = {"q_proj", "v_proj"}});
//   nn::AdamW adam(nn::lora_parameters(model));
//   ...
//   nn::save_lora(model, "mine");
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nn/low_rank.h"
#include "runtime/io/file_system.h"

namespace sherd::nn {

/// For `add_lora`.
struct LoraOptions {
  std::int64_t rank = 8;
  double alpha = 8;    ///< the addition is multiplied by alpha / rank
  double dropout = 0;  ///< of what the adapter is given, in training
  LoraScaling scaling = LoraScaling::by_rank;
  /// Names of `Linear` layers, or what follows a dot in them: "q_proj", "layers.0.mlp.up_proj"; "all-linear"
  /// is all but the head of a `Gpt` or `Llama`.
  std::vector<std::string> targets{};
  std::optional<DType> dtype{};  ///< of the adapters; if not given a layer's own, and f32 for 16 bits
};

/// Gives an adapter to every `Linear` below `model` that a target names, wherever it is a member: `lora_A`
/// starts uniform in +-1/sqrt(in), `lora_B` zero, so that forwards compute what they did. All other
/// parameters are frozen (`requires_grad`). Returns the layers' names. ValueError for options that no adapter
/// has and for a target that names no layer; StateError for a layer that has an adapter, and for a model that
/// is sharded: adapters are added first. When it throws, nothing has changed.
SHERD_API std::vector<std::string> add_lora(Module& model, const LoraOptions& options);
/// The adapters' parameters, for an optimizer: of a sharded model this rank's parts.
SHERD_API std::vector<Parameter> lora_parameters(const Module& model);
/// Adds the adapters into the weights and takes them away: forwards compute the same, to rounding, and cost
/// what they did. What was frozen stays so. StateError for a model without adapters, for a weight that is
/// tied to another layer's, which would change too, and for a sharded model; then nothing has changed.
SHERD_API void merge_lora(Module& model);
/// Takes the adapters away; the model is what it was before, and stays frozen. StateError as of `merge_lora`.
SHERD_API void remove_lora(Module& model);

/// For `save_lora`.
struct SaveLoraOptions {
  std::string base_model{};  ///< `base_model_name_or_path`: the folder of the frozen model, or its name
  FileSystem& files = posix_file_system();
};
/// Writes the adapters alone into the folder `folder`, as PEFT's `save_pretrained` would, for its
/// `PeftModel.from_pretrained` to read: adapter_model.safetensors and adapter_config.json. Its parent exists;
/// it takes its name when it is whole on the disk, in place of an older one. Of a sharded model one rank
/// saves, within `shard::summon_full_params`. FileError, also where the older folder holds other files than
/// these; StateError for a model without adapters, whose adapters differ in dropout or scaling, on `meta`, or
/// whose values are not whole.
SHERD_API void save_lora(const Module& model, const FileSystem::Path& folder,
                         const SaveLoraOptions& options = {});

/// For `load_lora`.
struct LoadLoraOptions {
  std::optional<DType> dtype{};  ///< of adapters that it adds; as of `add_lora`
  FileSystem& files = posix_file_system();
};
/// Reads such a folder, PEFT's too, into a model that has adapters of those ranks and forms, sharded or not,
/// or into one without any, to which it adds them as `add_lora` does. Every rank of a sharded model calls.
/// ValueError names a key of adapter_config.json that is not known, or whose value is not supported, and
/// tensors that are missing, unknown or of another shape; StateError for a model with other adapters.
/// DeviceError where the model is on `meta`. FileError. When it throws, nothing has changed.
SHERD_API void load_lora(Module& model, const FileSystem::Path& folder, const LoadLoraOptions& options = {});

}  // namespace sherd::nn
