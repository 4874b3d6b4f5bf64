// The owner of a rank's transports.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "collectives/transport.h"

namespace sherd {

/// Owns the transports of one rank. A transport may be used and destroyed on its rank's thread only, while
/// handles on groups (in models, losses, globals) may be dropped on any. A transport whose last handle goes
/// on the rank's thread is destroyed there and then; on another thread, at the rank's next call; and at the
/// latest with the rank's Context, whatever handles there still are.
class TransportHome : public std::enable_shared_from_this<TransportHome> {
 public:
  /// The calling rank's home, made on first use.
  static std::shared_ptr<TransportHome> current();

  /// Whether the calling thread is the rank's.
  bool is_current() const {
    return owner_ == std::this_thread::get_id() && !closed_.load(std::memory_order_relaxed);
  }
  /// Takes over a transport and returns a handle that may be copied and dropped on any thread. On the rank's
  /// thread.
  std::shared_ptr<Transport> keep(std::unique_ptr<Transport> transport);
  /// Destroys transports whose last handle went on another thread. On the rank's thread.
  void sweep();
  /// Destroys all transports. On the rank's thread.
  void close() noexcept;

 private:
  void let_go(Transport* transport) noexcept;

  const std::thread::id owner_ = std::this_thread::get_id();
  std::atomic<bool> closed_{false}, any_left_{false};
  std::mutex mutex_;  // guards what follows
  std::unordered_map<Transport*, std::unique_ptr<Transport>> living_;
  std::vector<std::unique_ptr<Transport>> left_;
};

}  // namespace sherd
