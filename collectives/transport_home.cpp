#include "collectives/transport_home.h"

#include <utility>

#include "runtime/context.h"

namespace sherd {
namespace {

struct Slot {
  std::shared_ptr<TransportHome> home = std::make_shared<TransportHome>();
  Slot() = default;
  ~Slot() { home->close(); }
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;
};

}  // namespace

std::shared_ptr<TransportHome> TransportHome::current() { return Context::current().slot<Slot>().home; }

std::shared_ptr<Transport> TransportHome::keep(std::unique_ptr<Transport> transport) {
  sweep();
  Transport* const address = transport.get();
  {
    const std::scoped_lock lock(mutex_);
    living_.emplace(address, std::move(transport));
    left_.reserve(living_.size() + left_.size());  // so that `let_go` never allocates
  }
  return {address, [home = shared_from_this()](Transport* t) { home->let_go(t); }};
}

void TransportHome::let_go(Transport* transport) noexcept {
  std::unique_ptr<Transport> gone;  // declared first, so it dies after the lock is released
  const std::scoped_lock lock(mutex_);
  const auto found = living_.find(transport);
  if (found == living_.end()) return;  // destroyed by `close`
  gone = std::move(found->second);
  living_.erase(found);
  if (is_current()) return;
  left_.push_back(std::move(gone));
  any_left_.store(true, std::memory_order_release);
}

void TransportHome::sweep() {
  if (!any_left_.load(std::memory_order_acquire)) return;
  std::vector<std::unique_ptr<Transport>> left;
  const std::scoped_lock lock(mutex_);
  left.swap(left_);
  left_.reserve(living_.size());
  any_left_.store(false, std::memory_order_relaxed);
}

void TransportHome::close() noexcept {
  decltype(living_) living;
  decltype(left_) left;
  const std::scoped_lock lock(mutex_);
  closed_.store(true, std::memory_order_relaxed);
  living.swap(living_);
  left.swap(left_);
}

}  // namespace sherd
