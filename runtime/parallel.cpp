#include "runtime/parallel.h"

#include <algorithm>

#ifdef SHERD_OPENMP
#include <omp.h>
#else
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#endif

namespace sherd::detail {
namespace {

struct Tiles {
  std::int64_t n = 0, grain = 1;
  TileBody call = nullptr;
  const void* body = nullptr;

  std::int64_t count() const { return (n + grain - 1) / grain; }
  void run(std::int64_t tile) const { call(body, tile * grain, std::min(n, (tile + 1) * grain)); }
  void run_all() const {
    for (std::int64_t tile = 0; tile < count(); ++tile) run(tile);
  }
};

}  // namespace

#ifdef SHERD_OPENMP

void run_tiles(std::int64_t n, std::int64_t grain, TileBody call, const void* body) {
  const Tiles tiles{n, grain, call, body};
  const std::int64_t count = tiles.count();
  // Asked first, because a worker thread has no rank state of its own.
  if (omp_in_parallel()) return tiles.run_all();
  const int threads = static_cast<int>(std::min<std::int64_t>(intra_op_threads(), count));
  if (threads == 1) return tiles.run_all();
#pragma omp parallel for schedule(static) num_threads(threads)
  for (std::int64_t tile = 0; tile < count; ++tile) tiles.run(tile);
}

#else

namespace {

thread_local bool inside_tiles = false;

/// The helpers of one calling thread, started when first needed and joined when that thread ends.
class Team {
 public:
  ~Team() {
    {
      std::lock_guard lock(mutex_);
      ending_ = true;
    }
    started_.notify_all();
    for (std::thread& thread : helpers_) thread.join();
  }

  void run(const Tiles& tiles, int threads) {
    while (static_cast<int>(helpers_.size()) < threads - 1) {
      const int rank = static_cast<int>(helpers_.size()) + 1;
      helpers_.emplace_back([this, rank, seen = round_] { help(rank, seen); });
    }
    {
      std::lock_guard lock(mutex_);
      tiles_ = tiles;
      threads_ = threads;
      busy_ = static_cast<int>(helpers_.size());
      ++round_;
    }
    started_.notify_all();
    inside_tiles = true;
    run_share(tiles, 0, threads);
    inside_tiles = false;
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  static void run_share(const Tiles& tiles, int rank, int threads) {
    const std::int64_t count = tiles.count();
    for (std::int64_t t = count * rank / threads; t < count * (rank + 1) / threads; ++t) tiles.run(t);
  }

  void help(int rank, std::uint64_t seen) {
    inside_tiles = true;
    std::unique_lock lock(mutex_);
    while (true) {
      started_.wait(lock, [&] { return ending_ || round_ != seen; });
      if (ending_) return;
      seen = round_;
      const Tiles tiles = tiles_;
      const int threads = threads_;
      lock.unlock();
      if (rank < threads) run_share(tiles, rank, threads);
      lock.lock();
      if (--busy_ == 0) finished_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable started_, finished_;
  std::vector<std::thread> helpers_;
  Tiles tiles_;
  std::uint64_t round_ = 0;
  int threads_ = 1, busy_ = 0;
  bool ending_ = false;
};

}  // namespace

void run_tiles(std::int64_t n, std::int64_t grain, TileBody call, const void* body) {
  const Tiles tiles{n, grain, call, body};
  if (inside_tiles) return tiles.run_all();
  const int threads = static_cast<int>(std::min<std::int64_t>(intra_op_threads(), tiles.count()));
  if (threads == 1) return tiles.run_all();
  thread_local Team team;
  team.run(tiles, threads);
}

#endif

}  // namespace sherd::detail
