// Intrusive shared ownership: a handle is one pointer, the count lies in the object and may change on any
// thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "runtime/export.h"

namespace sherd {

/// Base of everything held by `Ref`. Starts without an owner and is deleted when the last `Ref` goes.
class RefCounted {
 public:
  RefCounted() = default;
  RefCounted(const RefCounted&) noexcept {}  // a copy of the value starts with no owners
  RefCounted& operator=(const RefCounted&) noexcept { return *this; }
  virtual ~RefCounted() = default;
  // Tensors, storages and nodes are made with every op; the thread's CpuPool gives memory faster than malloc.
  SHERD_API static void* operator new(std::size_t bytes);
  SHERD_API static void operator delete(void* data, std::size_t bytes) noexcept;

  void retain() const noexcept { count_.fetch_add(1, std::memory_order_relaxed); }
  void drop() const noexcept {
    if (give_up()) delete this;
  }
  std::uint32_t use_count() const noexcept { return count_.load(std::memory_order_acquire); }

 protected:
  /// Counts one owner less; true when it was the last, and then the caller must delete the object. For
  /// classes whose objects own long chains of each other: they hide `drop` and delete a chain in a loop.
  bool give_up() const noexcept { return count_.fetch_sub(1, std::memory_order_acq_rel) == 1; }

 private:
  mutable std::atomic<std::uint32_t> count_{0};
};

/// A shared owner of a `RefCounted` object; null by default.
template <class T>
class Ref {
 public:
  Ref() = default;
  Ref(std::nullptr_t) {}
  explicit Ref(T* object) noexcept : object_(object) {
    if (object_) object_->retain();
  }
  Ref(const Ref& other) noexcept : Ref(other.object_) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  template <class U>
    requires std::is_convertible_v<U*, T*>
  Ref(const Ref<U>& other) noexcept : Ref(other.get()) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() {
    if (object_) object_->drop();
  }

  T* get() const noexcept { return object_; }
  T& operator*() const noexcept { return *object_; }
  T* operator->() const noexcept { return object_; }
  explicit operator bool() const noexcept { return object_ != nullptr; }
  /// A handle that owns nothing. Its destructor must never run, since that would count an owner that is none.
  static Ref borrow(T* object) noexcept {
    Ref ref;
    ref.object_ = object;
    return ref;
  }
  friend bool operator==(const Ref& a, const Ref& b) noexcept { return a.object_ == b.object_; }

 private:
  T* object_ = nullptr;
};

/// A new object and its first owner.
template <class T, class... Args>
Ref<T> make_ref(Args&&... args) {
  return Ref<T>(new T(std::forward<Args>(args)...));
}

}  // namespace sherd
