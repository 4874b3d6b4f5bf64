// Registrations (hooks, observers) and the handle that ends one.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace sherd {

/// The handle of one registration. Its destructor or `reset` ends that registration and no other. It may
/// outlive the object that it was registered with.
class Subscription {
 public:
  Subscription() = default;
  explicit Subscription(std::function<void()> end) : end_(std::move(end)) {}
  Subscription(Subscription&& other) noexcept : end_(std::exchange(other.end_, nullptr)) {}
  Subscription& operator=(Subscription&& other) noexcept {
    if (this == &other) return *this;
    reset();
    end_ = std::exchange(other.end_, nullptr);
    return *this;
  }
  ~Subscription() { reset(); }
  void reset() {
    if (end_) std::exchange(end_, nullptr)();
  }
  /// Gives up the handle: the registration lasts as long as the object it was made with.
  void keep() { end_ = nullptr; }

 private:
  std::function<void()> end_;
};

/// Registered values, in the order they came. From within `each` registrations may be ended (the rest of that
/// `each` skips them) and added (called from the next `each` on).
template <class T>
class Subscribers {
 public:
  Subscribers() = default;
  Subscribers(Subscribers&&) noexcept = default;
  Subscribers& operator=(Subscribers&&) noexcept = default;

  bool empty() const { return !entries_ || entries_->empty(); }

  Subscription add(T subscriber) {
    if (!entries_) entries_ = std::make_shared<Entries>();
    entries_->push_back(std::make_shared<Entry>(Entry{std::move(subscriber)}));
    return Subscription([entries = std::weak_ptr(entries_), entry = entries_->back().get()] {
      if (const auto alive = entries.lock()) end(*alive, entry);
    });
  }

  /// From now on one list with `other`, in place of what was registered here.
  void share(Subscribers& other) {
    if (!other.entries_) other.entries_ = std::make_shared<Entries>();
    entries_ = other.entries_;
  }

  /// Calls `tell(subscriber)` for each.
  template <class F>
  void each(F&& tell) const {
    if (empty()) return;
    const Entries now = *entries_;  // keeps an entry alive that ends during its own call
    for (const auto& entry : now)
      if (!entry->ended) tell(entry->subscriber);
  }

 private:
  struct Entry {
    T subscriber;
    bool ended = false;
  };
  using Entries = std::vector<std::shared_ptr<Entry>>;

  static void end(Entries& entries, const Entry* entry) {
    const auto at =
        std::find_if(entries.begin(), entries.end(), [&](const auto& e) { return e.get() == entry; });
    const std::shared_ptr<Entry> gone =
        std::move(*at);  // dies last: it may hold other subscriptions of this list
    gone->ended = true;
    entries.erase(at);
  }

  std::shared_ptr<Entries> entries_;
};

}  // namespace sherd
