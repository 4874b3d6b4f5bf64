// The model of a folder of the Hub as `sherd train --model` has it.
#pragma once

#include <variant>
#include <vector>

#include "nn/packing.h"
#include "nn/pretrained.h"
#include "tools/forecast.h"
#include "tools/train_options.h"

namespace sherd::tools {

/// A Gpt or a Llama, whose adapters have been added where they are asked for.
class TunedModel {
 public:
  /// With the folder's values, in f32 or, beneath adapters, in the dtype that is asked for. Adapters are
  /// drawn from the run's seed. Errors are those of reading the folder and of `nn::add_lora`, in the words of
  /// flags.
  static TunedModel read(const TrainOptions& options, FileSystem& files);
  /// On `meta`: names and shapes.
  static TunedModel on_meta(const TrainOptions& options, FileSystem& files);
  /// For ranks that share the weights: on `meta`, to be sharded and then loaded by each rank's parts, where
  /// that can be; adapters, a tied head, which files may have apart, and replicas call for all of it at once.
  static TunedModel to_share(const TrainOptions& options, FileSystem& files);
  /// Reads the folder's values into what is still on `meta`, on the options' device.
  void load(const TrainOptions& options, FileSystem& files);

  nn::Module& module();
  std::vector<nn::Module*> blocks();
  /// `nn::packed_loss`.
  Tensor loss(const nn::PackedBatch& batch, std::int64_t learnt);
  std::int64_t vocabulary() const;
  bool has_tied_head() const;

 private:
  using Model = std::variant<nn::Gpt, nn::Llama>;
  explicit TunedModel(Model model) : model_(std::move(model)) {}
  void add_adapters(const TrainOptions& options);
  Model model_;
};

/// Writes what a run has made of its model's folder, from a checkpoint's part: a folder as that one, in its
/// dtype, with its tokenizer; of adapters PEFT's folder. `saved` says how, but for `config_from`.
void save_tuned(const TrainOptions& options, const FileSystem::Path& checkpoint, const std::string& part,
                const FileSystem::Path& folder, nn::SavePretrainedOptions saved);
/// Bytes over all ranks that tuning takes at least. The options are within their ranges.
Forecast tuning_needs(const TrainOptions& options, FileSystem& files);

}  // namespace sherd::tools
