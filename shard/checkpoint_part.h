// What a checkpoint has files of.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "nn/ema.h"
#include "nn/grad_scaler.h"
#include "nn/optimizer.h"
#include "shard/checkpoint.h"
#include "shard/holders.h"
#include "shard/state_source.h"

namespace sherd::shard {

inline constexpr std::string_view saving = "save_checkpoint", loading = "load_checkpoint";

/// Something of a run under a name of its own, by which its files are named. Loading is in three steps: what
/// each rank may refuse for itself, what all refuse alike, and what cannot fail.
class CheckpointPart {
 public:
  explicit CheckpointPart(std::string name) : name_(std::move(name)) {}
  virtual ~CheckpointPart() = default;
  CheckpointPart(const CheckpointPart&) = delete;
  CheckpointPart& operator=(const CheckpointPart&) = delete;
  const std::string& name() const { return name_; }
  /// Whose parameters it is of; null for what is of none.
  virtual nn::Module* model() const { return nullptr; }
  virtual bool is_model() const { return false; }
  virtual bool is_optimizer() const { return false; }

  /// The name in the model of the parameter or buffer that an entry of the state is of; empty for none.
  virtual std::string parameter_of(const std::string&) const { return {}; }

  /// Throws for what cannot be saved.
  virtual void check_savable() const {}
  /// What this rank has. Collective over `ranks`.
  virtual ShardedStateDict state(const Group& ranks) const = 0;

  /// What a tensor of the save is called here; empty: it is left out.
  virtual std::string renamed(const std::string& saved) const { return saved; }
  virtual void stage(const StateSource& from) = 0;
  /// Names of the save that belong to nothing of this rank.
  virtual std::vector<std::string> unknown() const { return {}; }
  /// Those of them that belong to nothing of any rank: ValueError unless there are none.
  virtual void take_unknown(std::vector<std::string>) {}
  virtual void settle() {}
  virtual void commit() = 0;
  /// In place of `commit`: all is as before `stage`.
  virtual void undo() = 0;
  /// What of it is the same on all ranks, in a word.
  virtual std::string description() const { return name_; }

 private:
  std::string name_;
};

class ModelPart final : public CheckpointPart {
 public:
  ModelPart(std::string name, nn::Module& model, Frozen frozen = Frozen::saved)
      : CheckpointPart(std::move(name)), model_(model), frozen_(frozen) {}
  /// To load from the part that `options` name.
  ModelPart(const LoadCheckpointOptions& options, nn::Module& model)
      : CheckpointPart(options.part),
        model_(model),
        frozen_(options.frozen),
        strict_(options.strict),
        rename_(options.rename) {}
  nn::Module* model() const override { return &model_; }
  bool is_model() const override { return true; }
  std::string parameter_of(const std::string& entry) const override { return entry; }
  ShardedStateDict state(const Group& ranks) const override;
  std::string renamed(const std::string& saved) const override { return rename_ ? rename_(saved) : saved; }
  void stage(const StateSource& from) override { staged_.emplace(loading, model_, from, strict_, frozen_); }
  std::vector<std::string> unknown() const override { return staged_->mismatch().unknown; }
  void take_unknown(std::vector<std::string> names) override;
  void commit() override { staged_->commit(), staged_.reset(); }
  void undo() override { staged_.reset(); }
  /// What one side alone had, once it is loaded.
  const nn::Mismatch& mismatch() const { return mismatch_; }

 private:
  nn::Module& model_;
  Frozen frozen_;
  nn::Strict strict_ = nn::Strict::yes;
  std::function<std::string(const std::string&)> rename_{};
  std::optional<StagedModel> staged_;
  nn::Mismatch mismatch_;
};

/// By the names of the parameters in `model`.
class OptimizerPart final : public CheckpointPart {
 public:
  OptimizerPart(std::string name, nn::Optimizer& optimizer, nn::Module& model)
      : CheckpointPart(std::move(name)), optimizer_(optimizer), model_(model) {}
  nn::Module* model() const override { return &model_; }
  bool is_optimizer() const override { return true; }
  std::string parameter_of(const std::string& entry) const override { return parameter_of_state(entry); }
  void check_savable() const override { check_optimizer(optimizer_); }
  ShardedStateDict state(const Group& ranks) const override;
  void stage(const StateSource& from) override {
    moments_ = staged_optimizer_state(optimizer_, from, &model_);
  }
  std::vector<std::string> unknown() const override { return moments_.unknown; }
  void take_unknown(std::vector<std::string> names) override {
    check_none_left(loading, names, StagedOptimizer::what);
  }
  void settle() override { commit_ = optimizer_.stage_state_dict(std::move(moments_.part)); }
  void commit() override { std::exchange(commit_, {})(); }
  void undo() override { moments_ = {}, commit_ = {}; }

 private:
  nn::Optimizer& optimizer_;
  nn::Module& model_;
  StagedOptimizer moments_;
  std::function<void()> commit_;
};

/// By the names of what is averaged in `model`, which it was made of.
class AveragePart final : public CheckpointPart {
 public:
  AveragePart(std::string name, nn::Ema& ema, nn::Module& model)
      : CheckpointPart(std::move(name)), ema_(ema), model_(model) {}
  nn::Module* model() const override { return &model_; }
  std::string parameter_of(const std::string& entry) const override { return entry; }
  ShardedStateDict state(const Group& ranks) const override;
  void stage(const StateSource& from) override;
  std::vector<std::string> unknown() const override { return unknown_; }
  void take_unknown(std::vector<std::string> names) override { check_none_left(loading, names, "average"); }
  void commit() override;
  void undo() override { copies_.clear(); }

 private:
  ShardedStateDict averages() const;

  nn::Ema& ema_;
  nn::Module& model_;
  std::vector<std::pair<Tensor, Tensor>> copies_;  // into, from
  std::vector<std::string> unknown_;
};

/// Numbers, scalers and every rank's generator: whatever a run has beside tensors.
class NumbersPart final : public CheckpointPart {
 public:
  /// Of a number that counts or one that does not, how it is read and set.
  struct Number {
    std::string name;
    std::variant<std::function<std::int64_t()>, std::function<double()>> get;
    std::variant<std::function<void(std::int64_t)>, std::function<void(double)>> set;
  };

  explicit NumbersPart(std::string name) : CheckpointPart(std::move(name)) {}
  void add(Number number) { numbers_.push_back(std::move(number)); }
  void add(std::string name, nn::GradScaler& scaler) { scalers_.push_back({std::move(name), &scaler, {}}); }
  /// For the next load: the rank's place among those that load.
  void set_rank(int rank) { rank_ = rank; }

  ShardedStateDict state(const Group& ranks) const override;
  void stage(const StateSource& from) override;
  /// Sets the numbers, since whoever counts may refuse one.
  void settle() override;
  void commit() override;
  void undo() override;
  std::string description() const override;
  /// Another part's checksum in the save, and its entry there.
  static std::string checksum_entry(std::string_view part) { return fmt::format("saved.{}", part); }
  static ShardedTensor of_part(std::string_view part, std::uint64_t checksum);

 private:
  struct Scaler {
    std::string name;
    nn::GradScaler* scaler;
    nn::StateDict state;
  };
  std::vector<Number> numbers_;
  std::vector<Scaler> scalers_;
  int rank_ = 0;
  std::vector<Tensor> values_;
  RandomKey random_;
  std::vector<std::function<void()>> commits_, undos_;
};

}  // namespace sherd::shard
