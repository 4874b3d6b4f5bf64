// A run's folder: step-N/ with the model's and the optimizer's state (shard/checkpoint.h) and config.json,
// for the newest steps and the best one.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "collectives/group.h"
#include "nn/gpt.h"
#include "nn/optimizer.h"
#include "runtime/generator.h"
#include "runtime/io/file_system.h"
#include "tools/train_options.h"

namespace sherd::tools {

/// A validation loss in nats a byte and the step it belongs to.
struct Validation {
  std::int64_t step;
  double loss;
};

/// By what losses in f16 are multiplied (`nn::GradScaler`), and the steps since it last changed.
struct LossScale {
  double scale = 0;
  std::int64_t steps = 0;
};

/// What config.json holds: everything beside the tensors that the next step depends on, and how it came
/// about.
struct RunConfig {
  TrainOptions options;  ///< the recorded settings, and the data's paths
  std::uint64_t data_digest = 0;
  std::int64_t step = 0;  ///< steps done; the sampler's state too
  double loss = 0;        ///< of the last of them, in nats a byte
  RandomKey generator;
  /// Of a run that trains adapters: of the model beneath, which its checkpoints leave out.
  std::string base_digest{};
  std::optional<LossScale> loss_scale{};
  std::optional<Validation> best;
  std::vector<Change> changes;
  /// Of the files that say what the states hold, by name: checksums, by which the save is known. None in
  /// checkpoints of earlier versions.
  std::map<std::string, std::string> saved_beside{};
};

/// The folder of the checkpoint after `step` steps.
FileSystem::Path checkpoint_path(const FileSystem::Path& run, std::int64_t step);
/// The steps whose checkpoints `run` holds, rising; none where there is no such folder.
std::vector<std::int64_t> saved_steps(const FileSystem::Path& run, FileSystem& files);

/// Whether a checkpoint is named so, or so while it is written.
bool has_checkpoint_name(std::string_view name);
/// Whether anything in `run` is named as a checkpoint is.
bool has_checkpoints(const FileSystem::Path& run, FileSystem& files);
/// The step of the newest checkpoint in `run`, if there is one. ValueError that names what looks newer and is
/// none: a link or a file, a folder without config.json, a number that is written in another way.
std::optional<std::int64_t> newest_checkpoint(const FileSystem::Path& run, FileSystem& files);

/// config.json's text, and back: JSON's or this library's exceptions for what is missing, mistyped or out of
/// range.
std::string config_text(const RunConfig& config);
RunConfig parse_config(const std::string& text);

/// Writes a checkpoint as a whole: a crash of any rank leaves it complete or absent. All of `ranks` call, and
/// each writes its part; config.json is the first one's.
void save_checkpoint(const FileSystem::Path& run, const RunConfig& config, nn::Module& model,
                     const nn::Optimizer& optimizer, const Group& ranks, FileSystem& files);
/// Removes all checkpoints but the `keep` newest and the best.
void remove_old(const FileSystem::Path& run, const RunConfig& config, FileSystem& files);

// The rest reads one checkpoint. ValueError or FileError name the file and what is wrong with it; a byte that
// changed since it was written is noticed by the file's checksum. In a checkpoint that was made elsewhere no
// file has one.
RunConfig read_config(const FileSystem::Path& checkpoint, FileSystem& files);
/// Refuses a file without a checksum beside one with, a part that is missing, a file of another save, and
/// compares the shapes in the headers of the states with those of such a model, before one is built or a
/// tensor read: the weights alone, or the optimizer's state too.
void check_weights(const FileSystem::Path& checkpoint, const TrainOptions& options, FileSystem& files);
void check_states(const FileSystem::Path& checkpoint, const TrainOptions& options, FileSystem& files);
/// Into what lies on `ranks`, all of which call.
void load_states(const FileSystem::Path& checkpoint, const TrainOptions& options, nn::Module& model,
                 nn::Optimizer& optimizer, const Group& ranks, FileSystem& files);
void load_model(const FileSystem::Path& checkpoint, nn::Gpt& model, FileSystem& files);
/// ValueError where adapters were trained on another model than lies in the run's folder of it, which has the
/// digest `found`.
void check_base(const RunConfig& run, const std::string& found);

}  // namespace sherd::tools
