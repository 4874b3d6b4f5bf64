#include "runtime/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/context.h"
#include "runtime/held_signals.h"
#include "runtime/log.h"
#include "runtime/pause.h"

namespace sherd::detail {
namespace {

/// Set on a thread that runs tiles: `run_tiles` from within one runs all its tiles on that thread.
thread_local bool inside_tiles = false;

/// How many forks lie between this process and the first: a child has none of its parent's helper threads.
std::atomic<int>& forks() {
  static constinit std::atomic<int> count{0};
  [[maybe_unused]] static const int watched = pthread_atfork(nullptr, nullptr, [] { ++count; });
  return count;
}

/// The range of a tile, computed without overflow.
struct Piece {
  std::int64_t begin, end;
  Piece(std::int64_t n, std::int64_t grain, std::int64_t tile)
      : begin(tile * grain), end(begin + std::min(grain, n - begin)) {}
};

/// The helper threads of one calling thread, started when first needed and joined when that thread's context
/// ends. Tiles are claimed in short runs, by the caller too, the last ones alone, so a helper that the system
/// does not schedule delays only the few it holds. Waiting spins briefly, because the next call of a training
/// step is microseconds away, and then sleeps, because cores may be shared.
class Team {
 public:
  Team() = default;
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team() {
    abandon_helpers_of_parent();
    claim_.store(ending, std::memory_order_release);
    claim_.notify_all();
    for (std::thread& helper : *helpers_) helper.join();
  }

  void run(std::int64_t n, std::int64_t grain, std::int64_t count, TileBody call, const void* body,
           int threads) {
    start_helpers(threads - 1);
    // A helper may still be reading the last round. Its claim must fail before it can see any field of the
    // next job: so the closed claim is stored first, and whoever sees the new count sees that claim too.
    claim_.store((std::uint64_t{round_} << 32) | closed, std::memory_order_relaxed);
    count_.store(static_cast<std::uint32_t>(count), std::memory_order_release);
    n_.store(n, std::memory_order_relaxed);
    grain_.store(grain, std::memory_order_relaxed);
    call_.store(call, std::memory_order_relaxed);
    body_.store(body, std::memory_order_relaxed);
    threads_.store(threads, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    round_ = (round_ + 1) & round_mask;
    claim_.store(std::uint64_t{round_} << 32, std::memory_order_release);
    claim_.notify_all();
    inside_tiles = true;
    run_claims(0);
    inside_tiles = false;
    const auto all = static_cast<std::uint32_t>(count);
    for (int spins = 0; done_.load(std::memory_order_acquire) != all; ++spins) {
      if (spins < spin_limit)
        pause_briefly();
      else if (const std::uint32_t seen = done_.load(std::memory_order_acquire); seen != all)
        done_.wait(seen);
    }
    if (failed_.load(std::memory_order_relaxed)) {
      failed_.store(false, std::memory_order_relaxed);
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
  }

 private:
  static constexpr std::uint64_t ending = ~std::uint64_t{0};
  static constexpr std::uint32_t closed = 0xffffffff;      // as the next tile: no job has so many
  static constexpr std::uint32_t round_mask = 0x7fffffff;  // so that no claim equals `ending`
  static constexpr std::uint32_t longest_run = 16;         // tiles are made to fill a part of a core's cache
  static constexpr int spin_limit = 2000;                  // some tens of microseconds

  /// In a child of `fork` forgets the helpers, whose threads exist in the parent only.
  void abandon_helpers_of_parent() {
    if (forks_ == forks()) return;
    (void)helpers_.release();
    helpers_ = std::make_unique<std::vector<std::thread>>();
    forks_ = forks();
  }

  void start_helpers(int wanted) {
    abandon_helpers_of_parent();
    while (static_cast<int>(helpers_->size()) < std::min(wanted, most_helpers_)) {
      const int rank = static_cast<int>(helpers_->size()) + 1;
      const SignalsHeld held;  // they go to the program's own threads
      try {
        helpers_->emplace_back([this, rank] { help(rank); });
      } catch (const std::system_error& error) {  // without them the caller runs their tiles
        most_helpers_ = rank - 1;
        write_log(LogLevel::warning,
                  "parallel_for: helper thread {} could not be started ({}); going on with {}", rank,
                  error.what(), rank - 1);
      }
    }
  }

  void run_tile(TileBody call, const void* body, Piece tile) noexcept {
    if (failed_.load(std::memory_order_relaxed)) return;
    try {
      call(body, tile.begin, tile.end);
    } catch (...) {
      if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
    }
  }

  /// How many of `left` tiles a thread claims at once. Tiles beside each other on one core are read as one
  /// stream; the fewer are left, the fewer a thread that the system stops can hold up.
  static std::uint32_t run_of(std::uint32_t left, int threads) {
    return std::clamp<std::uint32_t>(left / (4 * static_cast<std::uint32_t>(threads)), 1, longest_run);
  }

  /// Claims and runs tiles until none is left in the current round.
  void run_claims(int rank) {
    std::uint64_t claim = claim_.load(std::memory_order_acquire);
    while (claim != ending) {
      const std::uint32_t count = count_.load(std::memory_order_acquire);
      const std::int64_t n = n_.load(std::memory_order_relaxed),
                         grain = grain_.load(std::memory_order_relaxed);
      const TileBody call = call_.load(std::memory_order_relaxed);
      const void* body = body_.load(std::memory_order_relaxed);
      const auto tile = static_cast<std::uint32_t>(claim);
      const int threads = threads_.load(std::memory_order_relaxed);
      if (tile >= count || rank >= threads) return;
      const std::uint32_t run = run_of(count - tile, threads);
      // Succeeds only if the round is still the one whose job was just read: a round ends when all its tiles
      // are claimed and done.
      if (!claim_.compare_exchange_weak(claim, claim + run, std::memory_order_acq_rel,
                                        std::memory_order_acquire))
        continue;
      for (std::uint32_t i = 0; i < run; ++i) run_tile(call, body, Piece(n, grain, tile + i));
      if (done_.fetch_add(run, std::memory_order_acq_rel) + run == count) done_.notify_one();
      claim = claim_.load(std::memory_order_acquire);
    }
  }

  void help(int rank) {
    inside_tiles = true;
    while (true) {
      run_claims(rank);
      std::uint64_t seen = claim_.load(std::memory_order_acquire);
      for (int spins = 0; !worth_a_look(seen, rank) && spins < spin_limit; ++spins) {
        pause_briefly();
        seen = claim_.load(std::memory_order_acquire);
      }
      if (seen == ending) return;
      if (!worth_a_look(seen, rank)) claim_.wait(seen);
    }
  }
  /// Whether a tile may be left to claim, or the team is ending.
  bool worth_a_look(std::uint64_t claim, int rank) const {
    return claim == ending || (static_cast<std::uint32_t>(claim) < count_.load(std::memory_order_relaxed) &&
                               rank < threads_.load(std::memory_order_relaxed));
  }

  std::unique_ptr<std::vector<std::thread>> helpers_ = std::make_unique<std::vector<std::thread>>();
  int forks_ = forks(), most_helpers_ = INT32_MAX;
  std::atomic<bool> failed_{false};  // in this round; whoever sets it stores the error
  std::exception_ptr error_;
  std::uint32_t round_ = 0;
  alignas(64) std::atomic<std::uint64_t> claim_{0};  // round in the upper half, next tile in the lower
  std::atomic<std::int64_t> n_{0}, grain_{1};
  std::atomic<std::uint32_t> count_{0};
  std::atomic<TileBody> call_{nullptr};
  std::atomic<const void*> body_{nullptr};
  std::atomic<int> threads_{1};
  alignas(64) std::atomic<std::uint32_t> done_{0};
};

}  // namespace

void run_tiles(std::int64_t n, std::int64_t grain, TileBody call, const void* body) {
  const std::int64_t count = (n - 1) / grain + 1;
  const int threads = static_cast<int>(std::min<std::int64_t>(inside_tiles ? 1 : intra_op_threads(), count));
  if (threads == 1 || count > INT32_MAX) {
    for (std::int64_t tile = 0; tile < count; ++tile) {
      const Piece piece(n, grain, tile);
      call(body, piece.begin, piece.end);
    }
    return;
  }
  Context::current().slot<Team>().run(n, grain, count, call, body, threads);
}

}  // namespace sherd::detail
