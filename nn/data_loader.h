// Batches of a training run, made ahead of their steps by threads.
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "nn/batch_sampler.h"
#include "runtime/generator.h"

namespace sherd::nn {

struct DataLoaderOptions {
  int workers = 0;  ///< threads that make batches; 0: `next` makes its batch on the caller's thread
  int ahead = 2;    ///< batches a worker makes ahead of the step that `next` gives
};

/// What a `DataLoader` has beside its types: the threads and the batches that wait for their steps.
class SHERD_API BatchQueue {
 public:
  using Samples = std::vector<std::int64_t>;
  using Made = std::shared_ptr<void>;

  /// `seed`: of the numbers that `make` draws. ValueError for workers below 0 or above 512, and for ahead
  /// below 1.
  BatchQueue(std::function<Samples(std::int64_t step)> sample, std::function<Made(const Samples&)> make,
             std::uint64_t seed, DataLoaderOptions options);
  BatchQueue(const BatchQueue&) = delete;
  BatchQueue& operator=(const BatchQueue&) = delete;
  ~BatchQueue();

  Made next();
  std::int64_t step() const { return step_; }
  void set_step(std::int64_t step);

 private:
  struct Shared;
  void start();
  void stop() noexcept;

  std::int64_t step_ = 0;
  std::unique_ptr<Shared> shared_;
};

/// Gives the batches of a sampler (`EpochSampler`, `BatchSampler`) in order, each made by `make` of the
/// numbers of this rank's samples:
///
///   nn::DataLoader loader(nn::EpochSampler(items, {.batch = 64, .seed = 1}),
///                         [&](std::span<const std::int64_t> samples) { return batch_of(data, samples); },
///                         {.workers = 4});
///   for (int epoch = 0; epoch < 10; ++epoch)
///     for (const nn::Batch& batch : loader.epoch()) train_on(batch);
///
/// A batch is anything that can be moved: a Tensor, a struct. It depends on the sampler's options and the
/// step alone, not on the workers: random numbers that `make` draws with the library's ops are those of a
/// generator of the sampler's seed and rank and the step, and nothing is recorded for gradients. So the step
/// is all there is to save.
///
/// Workers call `make` at the same time, so what it reads must not be written meanwhile, and each runs ops on
/// one thread. It makes tensors on the CPU, which any thread may use and drop; move them to a GPU with `to`
/// on the thread that trains. A loader is one thread's, and its end waits for the calls of `make` under way.
template <class Sampler, class Make>
requires std::invocable<Make&, std::span<const std::int64_t>>
class DataLoader {
 public:
  using Value = std::remove_cvref_t<std::invoke_result_t<Make&, std::span<const std::int64_t>>>;

  /// Begins at the sampler's step. ValueError for options out of range (`BatchQueue`).
  DataLoader(Sampler sampler, Make make, DataLoaderOptions options = {})
      : sampler_(std::move(sampler)),
        make_(std::move(make)),
        queue_([this](std::int64_t step) { return sampler_.at(step); },
               [this](const BatchQueue::Samples& samples) {
                 return std::make_shared<Value>(make_(std::span<const std::int64_t>(samples)));
               },
               seed_of(sampler_.options().seed, sampler_.options().rank), options) {
    queue_.set_step(sampler_.step());
  }

  /// The batch of the next step. What `make` threw for it comes here; the next call gives the step after it.
  /// StateError when the system starts no thread.
  Value next() { return std::move(*std::static_pointer_cast<Value>(queue_.next())); }
  /// The step that `next` gives, counted through all epochs: all there is to save, and to set again.
  std::int64_t step() const { return queue_.step(); }
  /// ValueError for a negative step.
  void set_step(std::int64_t step) { queue_.set_step(step); }

  /// The batches from here to the end of the epoch that the next step is in, for a `for` over them. A batch
  /// is taken when the loop comes to it, so `step()` in its body is the one after it.
  auto epoch() requires requires(const Sampler& s) { s.steps_per_epoch(); }
  {
    const std::int64_t steps = sampler_.steps_per_epoch();
    return Rest{*this, (step() / steps + 1) * steps};
  }

 private:
  /// Numbers of their own, which neither ranks nor who else draws from the same seed have.
  static std::uint64_t seed_of(std::uint64_t seed, int rank) {
    constexpr std::uint64_t aside = 0x6c6f61646572;
    return derived_seed(derived_seed(seed, aside), 1 + static_cast<std::uint64_t>(rank));
  }

  struct Rest {
    struct End {};
    struct Iterator {
      Rest& rest;
      Value& operator*() const { return *rest.value; }
      Iterator& operator++() {
        rest.take();
        return *this;
      }
      bool operator==(End) const { return !rest.value; }
    };
    Iterator begin() {
      take();
      return {*this};
    }
    End end() const { return {}; }
    void take() {
      value.reset();
      if (loader.step() < last) value.emplace(loader.next());
    }

    DataLoader& loader;
    std::int64_t last;
    std::optional<Value> value{};
  };

  Sampler sampler_;
  Make make_;
  BatchQueue queue_;  // last, so that its threads end first
};

}  // namespace sherd::nn
