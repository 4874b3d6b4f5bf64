// The state of a whole run in one checkpoint: models, optimizers, averages, a scaler, counts, generators.
//
//   shard::RunState run;
//   run.add("model", model).add("optimizer", adamw, model).add("muon", muon, model).add("ema", ema, model);
//   run.add("scaler", scaler).add("step", step).add("loader", loader);
//   shard::save_checkpoint(run, "runs/7/step-100", world.group());
//   shard::load_checkpoint(run, "runs/7/step-100", world.group());
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "shard/checkpoint.h"

namespace sherd::nn {
class Ema;
class GradScaler;
}  // namespace sherd::nn

namespace sherd::shard {

/// What counts steps, as samplers and loaders do.
template <class T>
concept CountsSteps = !std::derived_from<T, nn::Module> && !std::derived_from<T, nn::Optimizer> &&
                      requires(T& t, const T& c, std::int64_t step) {
                        { c.step() } -> std::same_as<std::int64_t>;
                        t.set_step(step);
                      };

/// What a run goes on from, each under a name. Refers to all of it, which must outlive this. ValueError for a
/// name that is there already, is "run" or "index", or has other characters than letters, digits, '_' and
/// '-'.
class SHERD_API RunState {
 public:
  RunState();
  ~RunState();
  RunState(RunState&&) noexcept;
  RunState& operator=(RunState&&) noexcept;

  RunState& add(std::string name, nn::Module& model, Frozen frozen = Frozen::saved);
  /// Of parameters of `model`, of all of them or of some.
  RunState& add(std::string name, nn::Optimizer& optimizer, nn::Module& model);
  /// Of `model`, which it was made of and is updated by.
  RunState& add(std::string name, nn::Ema& ema, nn::Module& model);
  RunState& add(std::string name, nn::GradScaler& scaler);
  /// Numbers are the first rank's: the same on all ranks.
  RunState& add(std::string name, std::int64_t& number);
  RunState& add(std::string name, double& number);
  /// A loader or a sampler: its step.
  template <CountsSteps T>
  RunState& add(std::string name, T& counter) {
    return add_count(
        std::move(name), [&counter] { return counter.step(); },
        [&counter](std::int64_t step) { counter.set_step(step); });
  }

  struct Impl;

 private:
  friend SHERD_API void save_checkpoint(const RunState& run, const FileSystem::Path& folder,
                                        const Group& ranks, const CheckpointOptions& options);
  friend SHERD_API void load_checkpoint(const RunState& run, const FileSystem::Path& folder,
                                        const Group& ranks, FileSystem& files);
  Impl& impl() const;  ///< StateError once it was moved from
  RunState& add_count(std::string name, std::function<std::int64_t()> get,
                      std::function<void(std::int64_t)> set);
  std::unique_ptr<Impl> impl_;
};

/// Writes all of it as one checkpoint: files NAME.* of each model, optimizer and average, and run.* of
/// numbers, scalers, and the generator of every rank. All ranks have the same parts, in the same order.
/// Collective; errors and what a crash leaves as of the other `save_checkpoint`, and ValueError for
/// `options.frozen`, which is said of each model that is added. Models and optimizers alone
/// load from it too, under the names "model" and "optimizer".
SHERD_API void save_checkpoint(const RunState& run, const FileSystem::Path& folder, const Group& ranks,
                               const CheckpointOptions& options = {});
/// Reads all of it back, on these ranks or any others, in any layout. A rank beyond those that saved has
/// their generator where all of them had the same one, else one derived from the first one's. Parts that the
/// folder has besides are left alone; a part or a number that it lacks, and numbers that nobody asks for, are
/// refused by name. Collective; nothing is changed on any rank where one throws.
SHERD_API void load_checkpoint(const RunState& run, const FileSystem::Path& folder, const Group& ranks,
                               FileSystem& files = posix_file_system());

}  // namespace sherd::shard
