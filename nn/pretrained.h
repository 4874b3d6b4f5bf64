// Models in Hugging Face's format: a folder with config.json and model.safetensors, or with
// model.safetensors.index.json and the files that it names.
//
//   nn::Llama model = nn::load_llama("TinyLlama-1.1B");
//   nn::save_pretrained(model, "mine");
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "nn/llama.h"
#include "runtime/io/safetensors.h"

namespace sherd::nn {

/// What the folder's config.json says of a model of the type `gpt2`, or of one of `LlamaFamily` (`llama`,
/// `mistral`, `qwen2`, `qwen3`, `gemma2`, `gemma3_text`, `phi3`), dtype included (f32 where it names none).
/// ValueError names a key, its value and what is supported, where that is something else, and a key that is
/// not known with those that are; keys that say nothing of what a model computes are passed over. FileError
/// where the file cannot be read.
SHERD_API GptOptions gpt_options(const FileSystem::Path& folder, FileSystem& files = posix_file_system());
SHERD_API LlamaOptions llama_options(const FileSystem::Path& folder, FileSystem& files = posix_file_system());

/// What the folder's config.json says, of whichever of the two it is.
using PretrainedOptions = std::variant<GptOptions, LlamaOptions>;
SHERD_API PretrainedOptions pretrained_options(const FileSystem::Path& folder,
                                               FileSystem& files = posix_file_system());

/// A tensor of a file that could not be loaded, and why.
struct DamagedTensor {
  std::string name, why;
};
/// What of a model was not loaded, and what of the files was not needed. Names are those of the files.
struct LoadReport : Mismatch {
  std::vector<DamagedTensor> damaged;
  bool complete() const { return missing.empty() && unknown.empty() && damaged.empty(); }
};

/// For `load_pretrained`.
struct LoadOptions {
  Strict strict = Strict::yes;
  Device device{};  ///< where a model that is on `meta` gets its memory
  FileSystem& files = posix_file_system();
};

/// Reads the folder's tensors into a model, one at a time: floats of 64 to 8 bits, cast to the model's dtype,
/// those of 8 bits times the `weight_scale` or `weight_scale_inv` that lies beside them. Of a sharded
/// parameter this rank keeps its part; every rank calls and reads for itself. Adapters stay as they are.
///
/// A tensor that is damaged (bytes that are not there, or do not fit a shape or checksum; another shape or
/// dtype than the model takes; in two files, or in a file that cannot be read), missing or unknown does not
/// keep the others from being loaded: it is reported, or, if strict, a ValueError that names the first few.
/// What headers and index tell, is told before anything is changed. FileError and ValueError where the folder
/// has no weights at all, DeviceError where a parameter on `meta` would get no values, an adapter's too.
SHERD_API LoadReport load_pretrained(Gpt& model, const FileSystem::Path& folder,
                                     const LoadOptions& options = {});
SHERD_API LoadReport load_pretrained(Llama& model, const FileSystem::Path& folder,
                                     const LoadOptions& options = {});

/// A model as the folder has it, every value loaded, in its dtype or in `dtype`. It is in training mode, as
/// every new module. Errors are those of the two calls it is made of.
SHERD_API Gpt load_gpt(const FileSystem::Path& folder, std::optional<DType> dtype = {}, Device device = {},
                       FileSystem& files = posix_file_system());
SHERD_API Llama load_llama(const FileSystem::Path& folder, std::optional<DType> dtype = {},
                           Device device = {}, FileSystem& files = posix_file_system());
/// Whichever of the two it is.
SHERD_API std::variant<Gpt, Llama> load_gpt_or_llama(const FileSystem::Path& folder,
                                                     std::optional<DType> dtype = {}, Device device = {},
                                                     FileSystem& files = posix_file_system());

/// For `save_pretrained`.
struct SavePretrainedOptions {
  /// Bytes of tensors in one file, unless a single one has more.
  std::uint64_t max_shard_size = 5'000'000'000;
  /// A folder whose config.json gives what the model does not know: tokens that end a text, names.
  std::optional<FileSystem::Path> config_from{};
  FileSystem& files = posix_file_system();
};

/// Writes the folder `folder` as Hugging Face's `save_pretrained` would, for `from_pretrained` to read: the
/// names, the transposed matrices of GPT-2, one file or several with an index. Its parent exists; it takes
/// its name when it is whole on the disk, in place of an older one. Of a sharded model one rank saves, within
/// `shard::summon_full_params`. FileError, also where the older folder holds other files than these;
/// StateError for sharded parameters that are not whole, on `meta`, for a model with adapters (see
/// nn/lora.h), and for options that config.json has no words for in the model's family.
SHERD_API void save_pretrained(const Gpt& model, const FileSystem::Path& folder,
                               const SavePretrainedOptions& options = {});
SHERD_API void save_pretrained(const Llama& model, const FileSystem::Path& folder,
                               const SavePretrainedOptions& options = {});

// ---- without a model: one tensor at a time in memory, whatever the model's size ----

/// Writes the folder from whole tensors under the names that a model of these options has for them, which are
/// read when it is their turn (twice: checksums come before the data). Vocabulary and tie are those of the
/// tensors. Errors as above; ValueError for tensors that such a model lacks, has besides, or has of other
/// shapes, before anything is written.
SHERD_API void save_pretrained(const GptOptions& model, std::span<const TensorRecord> tensors,
                               const FileSystem::Path& folder, const SavePretrainedOptions& options = {});
SHERD_API void save_pretrained(const LlamaOptions& model, std::span<const TensorRecord> tensors,
                               const FileSystem::Path& folder, const SavePretrainedOptions& options = {});
/// The same of the model that the config.json of `config_from` describes (ValueError without).
SHERD_API void save_pretrained(std::span<const TensorRecord> tensors, const FileSystem::Path& folder,
                               const SavePretrainedOptions& options);
/// A folder's tensors under the names that a model here has for them, in its config.json's dtype, in the
/// order of the model; each is read when it is asked for. Errors as `load_gpt` and `load_llama`.
SHERD_API std::vector<TensorRecord> pretrained_tensors(const FileSystem::Path& folder,
                                                       FileSystem& files = posix_file_system());
/// The tokens that end a text: `eos_token_id` of generation_config.json or, where that says nothing, of
/// config.json; none where neither names one. ValueError for what is no number of a token; errors of reading.
SHERD_API std::vector<std::int64_t> end_tokens(const FileSystem::Path& folder,
                                               FileSystem& files = posix_file_system());
/// By which the folder's model is known: another where a byte of its config.json or of its tensors' files is.
/// FileError and ValueError as of reading them.
SHERD_API std::string pretrained_digest(const FileSystem::Path& folder,
                                        FileSystem& files = posix_file_system());
/// Whether there is a folder whose config.json names a kind of model. Errors as of reading that file.
SHERD_API bool is_pretrained(const FileSystem::Path& folder, FileSystem& files = posix_file_system());

}  // namespace sherd::nn
