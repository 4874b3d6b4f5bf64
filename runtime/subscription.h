// Registrations (hooks, observers) and the handle that ends one.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace sherd {

/// What a registration gives back. Ends that registration, and no other, when it dies or is reset; it may
/// outlive what it was made on.
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
  /// Lets the registration live as long as what it was made on.
  void keep() { end_ = nullptr; }

 private:
  std::function<void()> end_;
};

/// Registrations in the order they came. While they are told, they may end themselves or others, who are not
/// told any more, and add new ones, who are told from the next time on.
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

  /// Calls `tell(subscriber)` for each.
  template <class F>
  void each(F&& tell) const {
    if (empty()) return;
    const Entries now = *entries_;  // keeps those alive that end while they are told
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
