// What a run trains and what with: the part of `sherd train` in which a model from nothing and one from a
// folder differ. How steps follow each other is in train.cpp.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "collectives/world.h"
#include "nn/module.h"
#include "runtime/io/file_system.h"
#include "runtime/late_value.h"
#include "shard/data_parallel.h"
#include "tools/train.h"

namespace sherd::tools {

/// One rank's part of a job. What all ranks take part in is called on all of them alike.
class TrainingJob {
 public:
  virtual ~TrainingJob();

  /// As it lies on the ranks.
  virtual nn::Module& model() = 0;

  /// A loss that may still be on its way from a device, and its share of this rank's part of the batch.
  struct Part {
    LateValue loss;
    double share;
  };
  /// Gradients of this rank's share of a step's batch, part by part, each given to `backward`; so that the
  /// average over ranks of what the parts add up to is the gradient of the batch's mean loss.
  virtual std::vector<Part> forward_backward(std::int64_t step,
                                             const std::function<void(const Tensor&)>& backward) = 0;
  /// Tokens of a step's batch, over all ranks.
  virtual std::int64_t tokens(std::int64_t step) const = 0;

  /// How much of the validation part is looked at.
  enum class Extent { sample, all };
  /// Mean loss in nats a token, the same to the bit for any number of ranks. Leaves the model in training
  /// mode.
  virtual double validate(Extent extent) = 0;

  /// Of `facts` what is the job's, on the first rank.
  virtual void describe(RunFacts& facts) const = 0;
  /// After the last step: what the job leaves in the run's folder `out`, whose best checkpoint is given, and
  /// of `result` what is the job's.
  virtual void finish(const FileSystem::Path& out, const FileSystem::Path& best, TrainResult& result) = 0;
};

}  // namespace sherd::tools
