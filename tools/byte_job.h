// Training a Gpt on bytes from nothing.
#pragma once

#include "nn/batch_sampler.h"
#include "nn/gpt.h"
#include "tools/text.h"
#include "tools/training_job.h"

namespace sherd::tools {

class ByteJob final : public TrainingJob {
 public:
  ByteJob(const TrainOptions& options, const Text& text, const World& world);

  nn::Module& model() override { return model_; }
  std::vector<Part> forward_backward(std::int64_t step,
                                     const std::function<void(const Tensor&)>& backward) override;
  std::int64_t tokens(std::int64_t step) const override;
  double validate(Extent extent) override;
  void describe(RunFacts& facts) const override;
  void finish(const FileSystem::Path& out, const FileSystem::Path& best, TrainResult& result) override;

 private:
  std::string sample();

  TrainOptions options_;
  const Text& text_;
  Group group_;
  nn::Gpt model_;
  std::unique_ptr<shard::DataParallel> replicas_;
  nn::BatchSampler sampler_;
  double bigram_ = 0;
};

}  // namespace sherd::tools
