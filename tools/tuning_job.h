// Tuning the model of a folder on packed documents: all of its weights, or adapters.
#pragma once

#include "nn/batch_sampler.h"
#include "tools/tokens.h"
#include "tools/training_job.h"
#include "tools/tuned_model.h"

namespace sherd::tools {

class TuningJob final : public TrainingJob {
 public:
  TuningJob(const TrainOptions& options, const Tokens& tokens, const World& world, FileSystem& files);

  nn::Module& model() override { return model_.module(); }
  std::vector<Part> forward_backward(std::int64_t step,
                                     const std::function<void(const Tensor&)>& backward) override;
  std::int64_t tokens(std::int64_t step) const override;
  double validate(Extent extent) override;
  void describe(RunFacts& facts) const override;
  void finish(const FileSystem::Path& out, const FileSystem::Path& best, TrainResult& result) override;

 private:
  double summed_loss(std::int64_t row);

  TrainOptions options_;
  const Tokens& tokens_;
  Group group_;
  FileSystem& files_;
  TunedModel model_;
  std::unique_ptr<shard::DataParallel> replicas_;
  nn::EpochSampler mine_, all_;
  std::int64_t trained_ = 0;  ///< parameters' elements
};

}  // namespace sherd::tools
