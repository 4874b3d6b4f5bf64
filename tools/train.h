// The main job: trains a GPT on bytes, or tunes a model of a folder of the Hub. Prints nothing; a reporter
// hears of everything.
#pragma once

#include <optional>
#include <string>

#include "runtime/io/file_system.h"
#include "tools/train_options.h"

namespace sherd::tools {

/// What is known before the first step. Losses are in nats a byte, of a model from a folder a token.
struct RunFacts {
  FileSystem::Path out;
  std::int64_t step = 0, steps = 0;  ///< done and in all
  std::int64_t parameters = 0, files = 0;
  std::int64_t train_bytes = 0, validation_bytes = 0;  ///< of a model from a folder: tokens
  std::optional<std::int64_t> trained{};               ///< parameters, where the others are frozen
  std::optional<double> bigram{};                      ///< of a model of bytes
};

struct StepFacts {
  std::int64_t step, steps;  ///< done and in all
  double loss;               ///< of this step
  double tokens_per_s;       ///< over the steps of this session
  double seconds_left;       ///< validations and checkpoints counted in
};

struct TrainResult;

/// Hears of a run as it goes, from rank 0's thread; of a step when the next one is under way, of one that is
/// validated or the last at once. What it throws ends the run as a crash would.
class Reporter {
 public:
  virtual ~Reporter();
  /// In every process, once all ranks have met: nothing was begun before.
  virtual void met() {}
  virtual void started(const RunFacts&) {}
  virtual void stepped(const StepFacts&) {}
  virtual void validated(std::int64_t /*step*/, double /*loss*/) {}
  virtual void saved(const FileSystem::Path& /*checkpoint*/) {}
  virtual void finished(const TrainResult&) {}
  /// Asked after each step, in every process; one that says true has all ranks save a checkpoint and end the
  /// run.
  virtual bool stop_wanted() { return false; }
};

struct TrainResult {
  FileSystem::Path out;
  std::int64_t step = 0;
  double loss = 0;                 ///< of the last step
  std::optional<double> val_loss;  ///< over the whole validation part; none when the run was stopped
  double bigram = 0;
  double tokens_per_s = 0;
  std::string sample;
  FileSystem::Path tuned;  ///< the folder that a run from a model's folder leaves at its end
};

/// Trains from the start, or goes on where the newest checkpoint was, to the same bits as a run that was
/// never stopped, on the same number of ranks. Every process reads the data and the checkpoint, of which each
/// rank writes its part; all else in the run's folder is rank 0's. The result of a process that rank 0 is not
/// in is empty. ValueError and FileError say what is wrong with the options, the data, the checkpoint or the
/// disk; StateError names the step whose loss or gradient was not finite. Whatever it throws, the newest
/// checkpoint in the run's folder is complete.
TrainResult train(const TrainOptions& options, FileSystem& files, Reporter& reporter);

}  // namespace sherd::tools
