// What `sherd train` can be told. The settings are listed once: flags and their help, the checks of their
// range, config.json and what --resume lets change derive from the list.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "nn/gpt.h"
#include "runtime/io/file_system.h"
#include "shard/options.h"

namespace sherd::tools {

struct TrainOptions {
  std::vector<std::string> data;  ///< files and folders; none: the text of this project
  std::string
      out;  ///< the run's folder; none: the next free of runs/1, runs/2, ..., or the newest with `resume`
  bool resume = false;
  int threads = 0;            ///< 0: as many as the context has
  std::int64_t sample = 300;  ///< bytes to generate at the end
  std::string trace;          ///< file for a trace of where time goes; none: no trace

  std::int64_t steps = 800, batch = 16, micro_batch = 0;  ///< micro_batch 0: the whole batch at once
  std::int64_t layers = 4, heads = 4, width = 128, context = 128;
  double dropout = 0, lr = 1e-3, min_lr = 1e-4;
  std::int64_t warmup = 100;
  double beta2 = 0.99, weight_decay = 0.1, clip = 1;
  std::int64_t eval_every = 200, keep = 2;
  std::uint64_t seed = 1337;

  // How the work lies on ranks. What is computed follows the ranks and the dtypes alone.
  std::int64_t ranks = 1;  ///< of one process; 0: one a core. A launcher's number is what it started
  std::string strategy = "full_shard", layout = "per-parameter";
  std::string param_dtype = "f32", reduce_dtype = "f32";
  std::string reshard = "true";  ///< true, false or a number of ranks
  std::string device = "cpu";    ///< where it is computed: cpu or cuda

  // Of a run that tunes the model of a folder; see `with_tuning_defaults`.
  std::string model;  ///< the folder; none: a Gpt on bytes, from nothing
  std::int64_t epochs = 3;
  std::int64_t lora = 0;                    ///< rank of adapters; 0: all weights are trained
  double lora_alpha = 0, lora_dropout = 0;  ///< alpha 0: twice the rank
  std::string lora_layers = "all-linear";   ///< names with commas between
  std::string base_dtype = "bf16";          ///< of what adapters leave frozen

  /// Names of the settings that were asked for. The others are taken from the checkpoint when a run is
  /// resumed.
  std::set<std::string, std::less<>> given;
};

/// What --resume does with a setting that differs from the checkpoint's.
enum class OnResume {
  refused,   ///< the run would not be the same run
  recorded,  ///< written into config.json with the step
  free,      ///< changes nothing that is computed; not in config.json
};

/// One entry of the list. The range of a number includes both ends.
struct Setting {
  std::string_view name;  ///< of the flag, without the dashes
  std::string_view what;  ///< what it is, with its unit
  std::string_view example;
  double min, max;
  OnResume on_resume;
  std::string_view words{};  ///< what a text may be, with bars between; empty: see `validate`
  bool late = false;         ///< checkpoints from before there were ranks lack it: they hold its default
};

/// Of the settings, those that say how the work lies on ranks.
void visit_rank_settings(auto& o, auto&& on) {
  using enum OnResume;
  on(Setting{"ranks",
             "ranks that share the work, threads of this process; they divide the batch; 0 takes one a core; "
             "under sherd launch, torchrun or Slurm leave it out: ranks are the processes",
             "2",
             0,
             4096,
             recorded,
             {},
             true},
     o.ranks);
  on(Setting{"strategy",
             "what ranks share: full_shard everything; shard_grad_op gathers parameters once a step; zero1 "
             "keeps gradients whole until backward ends; no_shard and data_parallel only average gradients",
             "zero1", 0, 0, recorded, "full_shard|shard_grad_op|zero1|no_shard|data_parallel", true},
     o.strategy);
  on(Setting{"layout", "how parameters are cut: each along its rows, or all of a block as one flat piece",
             "flat", 0, 0, recorded, "flat|per-parameter", true},
     o.layout);
  on(Setting{"param-dtype",
             "dtype of gathered parameters and of computation; what is stored and stepped is f32", "bf16", 0,
             0, recorded, "f32|bf16|f16", true},
     o.param_dtype);
  on(Setting{"reduce-dtype", "dtype in which gradients are averaged over ranks", "bf16", 0, 0, recorded,
             "f32|bf16|f16", true},
     o.reduce_dtype);
  on(Setting{"reshard",
             "whether full_shard frees a block's parameters after its forward: true, false, or a number of "
             "neighbouring ranks that keep them among themselves",
             "false",
             0,
             0,
             recorded,
             {},
             true},
     o.reshard);
  on(Setting{"device",
             "where it is computed: cpu, or cuda for a GPU of each rank's own as far as the machine has "
             "them, with --param-dtype bf16 unless it is given",
             "cuda", 0, 0, recorded, "cpu|cuda", true},
     o.device);
}

/// Of the settings, those of a run that tunes a model of a folder.
void visit_tuning_settings(auto& o, auto&& on) {
  using enum OnResume;
  on(Setting{"model",
             "folder of a model to go on from (config.json, model.safetensors, tokenizer), of Llama's family "
             "or GPT-2: --data is then also lines of JSON (.jsonl), --context and --batch count its tokens "
             "and rows of them, and defaults are those of tuning: --lr 2e-5 (2e-4 with --lora), --min-lr 0, "
             "--beta2 0.999, --weight-decay 0, --batch 8, --micro-batch 1, --context 1024 or what the model "
             "has, --warmup 3% of the steps, --eval-every a tenth of them",
             "TinyLlama-1.1B",
             0,
             0,
             refused,
             {},
             true},
     o.model);
  on(Setting{"epochs",
             "with --model: how often the data is gone through, unless --steps is given",
             "1",
             1,
             1 << 20,
             recorded,
             {},
             true},
     o.epochs);
  on(
      Setting{
          "lora",
          "with --model: rank of adapters (LoRA), which are trained in f32 in place of the weights; 0 trains "
          "all weights",
          "16",
          0,
          1 << 20,
          refused,
          {},
          true},
      o.lora);
  on(Setting{"lora-alpha",
             "with --lora: what adapters add is times alpha / rank; 0 takes twice the rank",
             "32",
             0,
             1 << 30,
             refused,
             {},
             true},
     o.lora_alpha);
  on(Setting{"lora-dropout",
             "with --lora: probability that a feature is dropped from what an adapter is given in training, "
             "below 1",
             "0.05",
             0,
             1,
             refused,
             {},
             true},
     o.lora_dropout);
  on(
      Setting{
          "lora-layers",
          "with --lora: names of linear layers that get adapters, or the ends of names, with commas between; "
          "all-linear is all but the head",
          "q_proj,v_proj",
          0,
          0,
          refused,
          {},
          true},
      o.lora_layers);
  on(Setting{"base-dtype", "with --lora: dtype of the frozen weights", "f32", 0, 0, refused, "bf16|f32",
             true},
     o.base_dtype);
}

/// Calls `on(setting, value)` for every setting of `o`, constant or not.
void visit_settings(auto& o, auto&& on) {
  using enum OnResume;
  constexpr double many = 1 << 30;
  // A checkpoint's files have room for the names of so many blocks, and sizes up to this can be counted.
  constexpr double most_layers = 3000, most_width = 1 << 22;
  on(Setting{"steps", "optimizer steps of the whole run", "2000", 1, many, recorded}, o.steps);
  on(Setting{"batch", "windows of text an optimizer step, over all micro-batches", "64", 1, many, refused},
     o.batch);
  on(Setting{"micro-batch",
             "windows a forward and backward of one rank; gradients add up to those of the batch; 0 takes "
             "the rank's whole share at once",
             "8", 0, many, recorded},
     o.micro_batch);
  on(Setting{"layers", "Transformer blocks", "6", 1, most_layers, refused}, o.layers);
  on(Setting{"heads", "attention heads a block; they divide the width", "6", 1, most_width, refused},
     o.heads);
  on(Setting{"width", "features a position", "384", 1, most_width, refused}, o.width);
  on(Setting{"context", "bytes a window: how far back the model sees", "256", 1, many, refused}, o.context);
  on(Setting{"dropout", "probability that a feature or an attention weight is dropped in training, below 1",
             "0.2", 0, 1, refused},
     o.dropout);
  on(Setting{"lr", "highest learning rate, above 0, reached after the warm-up", "6e-4", 0, many, refused},
     o.lr);
  on(Setting{"min-lr", "learning rate at the last step, after half a cosine", "6e-5", 0, many, refused},
     o.min_lr);
  on(Setting{"warmup", "steps in which the learning rate rises linearly", "50", 0, many, refused}, o.warmup);
  on(Setting{"beta2", "AdamW's decay of the squared gradients a step, below 1 (beta1 is 0.9)", "0.999", 0, 1,
             refused},
     o.beta2);
  on(Setting{"weight-decay",
             "AdamW's decay of matrices, as a multiple of the learning rate a step; vectors do not decay",
             "0.01", 0, many, refused},
     o.weight_decay);
  on(Setting{"clip", "largest Euclidean norm of the gradient, longer ones are scaled down; 0 clips nothing",
             "0.5", 0, many, refused},
     o.clip);
  on(Setting{"eval-every", "steps between validations, with a checkpoint at each", "100", 1, many, recorded},
     o.eval_every);
  on(Setting{"keep", "newest checkpoints that stay in the run's folder, beside the best", "5", 1, many, free},
     o.keep);
  on(Setting{"seed", "seed of weights, batches and dropout, a whole number from 0", "42", 0, 0x1p64, refused},
     o.seed);
  visit_rank_settings(o, on);
  visit_tuning_settings(o, on);
}

/// ValueError naming the flag for a value that is none of its range or its words.
void check_ranges(const TrainOptions& options);
/// The same, and for values that do not fit together.
void validate(const TrainOptions& options);

/// With a model's folder: `o` with what tuning has for settings that were not given, as far as sizes of the
/// model say them; its layers, heads and width are the model's. ValueError and FileError as of reading
/// config.json, and for settings that such a run has not.
TrainOptions with_tuning_defaults(TrainOptions o, FileSystem& files);
/// And what follows from how many rows the data makes.
TrainOptions with_steps(TrainOptions o, std::int64_t rows);

/// The settings that a checkpoint records, by name.
nlohmann::json to_json(const TrainOptions& options);
/// Options with the settings that `to_json` wrote; throws nlohmann's exceptions for missing and mistyped
/// entries.
TrainOptions settings_from(const nlohmann::json& json);

/// Ranks to ask `run_ranks` for: as many as a launcher started, else `options.ranks`. ValueError where
/// --ranks was given and says another number than the launcher.
int ranks_to_run(const TrainOptions& options);

nn::GptOptions model_options(const TrainOptions& options);

/// ValueError for text that is neither true nor false nor a number from 1.
shard::ReshardAfterForward reshard_of(const TrainOptions& options);
/// "f32", "bf16" or "f16".
DType dtype_named(std::string_view name);

/// The device of the name cpu or cuda.
Device device_named(std::string_view name);

/// A setting that was changed when the run went on from `step`; values as JSON text.
struct Change {
  std::int64_t step;
  std::string name, from, to;
};

/// What a resumed run trains with: the checkpoint's settings, and of `asked` those that were given. Where
/// they differ, either a ValueError that names the flag, or an entry in `changes`.
TrainOptions resumed(const TrainOptions& asked, const TrainOptions& saved, std::int64_t step,
                     std::vector<Change>& changes);

}  // namespace sherd::tools
