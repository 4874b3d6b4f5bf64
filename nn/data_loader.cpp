#include "nn/data_loader.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "runtime/backend.h"
#include "runtime/context.h"
#include "runtime/error.h"
#include "runtime/held_signals.h"

namespace sherd::nn {
namespace {

constexpr int most_workers = 512;

/// A scope in which the calling thread draws from the stream of one step.
class Drawing {
 public:
  explicit Drawing(std::uint64_t seed, std::int64_t step) : before_(Context::current().generator()) {
    Context::current().set_generator(Generator(derived_seed(seed, 1 + static_cast<std::uint64_t>(step))));
  }
  ~Drawing() { Context::current().set_generator(before_); }
  Drawing(const Drawing&) = delete;
  Drawing& operator=(const Drawing&) = delete;

 private:
  Generator before_;
};

/// The batch of a step, or why there is none.
struct Slot {
  std::int64_t step;
  BatchQueue::Made made{};
  std::exception_ptr error{};
  bool done = false;
};

}  // namespace

struct BatchQueue::Shared {
  std::function<Samples(std::int64_t)> sample;
  std::function<Made(const Samples&)> make;
  std::uint64_t seed;
  DataLoaderOptions options;

  std::mutex mutex;  // of all that follows, and of `sample`
  std::condition_variable room, ready;
  std::deque<std::shared_ptr<Slot>> slots;  // of the steps from the next one on, as far as they were begun
  std::int64_t begin = 0;                   // the step that a worker begins next
  bool stopping = false;
  std::vector<std::thread> threads;

  Made made(const Samples& samples, std::int64_t step) const {
    const Drawing drawing(seed, step);
    const NoGrad no_grad;
    return make(samples);
  }

  /// A worker's life.
  void work() {
    std::unique_lock lock(mutex);
    const auto limit = static_cast<std::size_t>(options.workers) * static_cast<std::size_t>(options.ahead);
    for (;;) {
      room.wait(lock, [&] { return stopping || slots.size() < limit; });
      if (stopping) return;
      const auto slot = slots.emplace_back(std::make_shared<Slot>(begin++));
      fill(*slot, lock);
      ready.notify_one();
    }
  }

  /// Unlocked while the batch is made. Whoever gave up on its step meanwhile does not see the slot any more.
  void fill(Slot& slot, std::unique_lock<std::mutex>& lock) {
    Made batch;
    std::exception_ptr error;
    try {
      const Samples samples = sample(slot.step);
      lock.unlock();
      batch = made(samples, slot.step);
      synchronize();  // a device's work too, before another thread reads it
    } catch (...) {
      error = std::current_exception();
    }
    if (!lock.owns_lock()) lock.lock();
    slot.made = std::move(batch);
    slot.error = std::move(error);
    slot.done = true;
  }
};

BatchQueue::BatchQueue(std::function<Samples(std::int64_t)> sample, std::function<Made(const Samples&)> make,
                       std::uint64_t seed, DataLoaderOptions options)
    : shared_(new Shared{std::move(sample), std::move(make), seed, options}) {
  check<ValueError>(options.workers >= 0 && options.workers <= most_workers,
                    "DataLoader: {} workers, it takes 0 to {}", options.workers, most_workers);
  check<ValueError>(options.ahead >= 1, "DataLoader: {} batches ahead, at least 1 is needed", options.ahead);
}

BatchQueue::~BatchQueue() { stop(); }

void BatchQueue::start() {
  if (!shared_->threads.empty()) return;
  shared_->begin = step_;
  try {
    const sherd::detail::SignalsHeld held;  // they go to the program's own threads
    for (int i = 0; i < shared_->options.workers; ++i)
      shared_->threads.emplace_back([shared = shared_.get()] {
        Context& context = Context::current();
        context.set_threads(1);
        context.set_generator(
            Generator());  // else its first use would take a thread's place in the order of streams
        shared->work();
      });
  } catch (const std::exception& error) {
    const std::size_t started = shared_->threads.size();
    stop();
    fail<StateError>("DataLoader: the system starts only {} of {} workers' threads ({}); ask for fewer",
                     started, shared_->options.workers, error.what());
  }
}

void BatchQueue::stop() noexcept {
  {
    const std::scoped_lock lock(shared_->mutex);
    shared_->stopping = true;
  }
  shared_->room.notify_all();
  for (std::thread& thread : shared_->threads) thread.join();
  shared_->threads.clear();
  shared_->slots.clear();
  shared_->stopping = false;
}

BatchQueue::Made BatchQueue::next() {
  Shared& shared = *shared_;
  if (shared.options.workers == 0) {
    const std::int64_t step = step_++;
    return shared.made(shared.sample(step), step);
  }
  start();
  std::shared_ptr<Slot> slot;
  {
    std::unique_lock lock(shared.mutex);
    shared.ready.wait(lock, [&] { return !shared.slots.empty() && shared.slots.front()->done; });
    slot = std::move(shared.slots.front());
    shared.slots.pop_front();
    ++step_;
  }
  shared.room.notify_one();
  if (slot->error) std::rethrow_exception(slot->error);
  return std::move(slot->made);
}

void BatchQueue::set_step(std::int64_t step) {
  check<ValueError>(step >= 0, "DataLoader: step {} is negative", step);
  std::deque<std::shared_ptr<Slot>> dropped;
  {
    const std::scoped_lock lock(shared_->mutex);
    if (std::exchange(step_, step) == step) return;
    shared_->begin = step;
    dropped.swap(shared_->slots);
  }
  shared_->room.notify_all();
}

}  // namespace sherd::nn
