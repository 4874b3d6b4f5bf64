// What ranks agree on before a run's first step.
#pragma once

#include <mutex>
#include <optional>

#include "collectives/world.h"
#include "tools/checkpoint.h"
#include "tools/text.h"
#include "tools/tokens.h"

namespace sherd::tools {

/// The data, read once a process by whichever rank comes first.
class SharedText {
 public:
  /// ValueError or FileError for data that cannot be trained on.
  const Text& get(const TrainOptions& options, FileSystem& files);
  /// The same of a run that tunes a model: of a new run, made of the data; of one that goes on, those in its
  /// folder, made again where they are lost; on ranks but the first, those in the folder.
  const Tokens& new_tokens(const TrainOptions& options, FileSystem& files);
  const Tokens& kept_tokens(const RunConfig& config, const FileSystem::Path& out, FileSystem& files);
  const Tokens& tokens(const RunConfig& config, const FileSystem::Path& out, FileSystem& files);
  /// Of the data that the options name.
  std::uint64_t digest(const TrainOptions& options, FileSystem& files);
  /// `nn::pretrained_digest` of the model beneath adapters; empty without.
  std::string base_digest(const TrainOptions& options, FileSystem& files);

 private:
  std::mutex mutex_;
  std::string base_digest_;
  std::optional<Text> text_;
  std::optional<Tokens> tokens_;
};

/// A run's folder and what it begins or goes on with.
struct Start {
  FileSystem::Path out;
  RunConfig config;
  std::unique_ptr<FileLock> lock{};  ///< of the folder, on rank 0
};

/// How many ranks to start: as launched or asked, or as many as the run that goes on had. 0: see `run_ranks`.
int ranks_to_start(const TrainOptions& asked, FileSystem& files);

/// Rank 0 settles what is asked for, makes the folder of a new run and locks it, every check of options and
/// data before; then all ranks have the same, of settings what a checkpoint records.
Start start_run(TrainOptions asked, FileSystem& files, SharedText& text, const World& world);

}  // namespace sherd::tools
