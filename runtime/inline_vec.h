// A vector whose first N elements need no allocation. Ops have few inputs and outputs; most calls never touch
// the heap.
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <new>
#include <span>
#include <utility>

namespace sherd {

/// A vector that holds up to N elements in place and more on the heap. Indices are not checked. A move takes
/// the heap block, or moves the elements, and leaves the source empty.
template <class T, std::size_t N>
class InlineVec {
 public:
  InlineVec() = default;
  explicit InlineVec(std::size_t n) { resize(n); }
  InlineVec(std::initializer_list<T> items) { assign(items.begin(), items.size()); }
  explicit InlineVec(std::span<const T> items) { assign(items.data(), items.size()); }
  InlineVec(const InlineVec& other) { assign(other.begin(), other.size_); }
  InlineVec(InlineVec&& other) noexcept { take(other); }
  InlineVec& operator=(const InlineVec& other) {
    if (this != &other) {
      clear();
      assign(other.begin(), other.size_);
    }
    return *this;
  }
  InlineVec& operator=(InlineVec&& other) noexcept {
    if (this != &other) {
      clear();
      free_heap();
      take(other);
    }
    return *this;
  }
  ~InlineVec() {
    clear();
    free_heap();
  }

  template <class... Args>
  T& emplace_back(Args&&... args) {
    if (size_ == capacity_) grow(size_ + 1);
    return *std::construct_at(data_ + size_++, std::forward<Args>(args)...);
  }
  void push_back(T item) { emplace_back(std::move(item)); }
  void resize(std::size_t n) {
    reserve(n);
    while (size_ < n) std::construct_at(data_ + size_++);
    while (size_ > n) std::destroy_at(data_ + --size_);
  }
  void reserve(std::size_t n) {
    if (n > capacity_) grow(n);
  }
  void clear() noexcept {
    std::destroy_n(data_, size_);
    size_ = 0;
  }

  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  T* begin() noexcept { return data_; }
  T* end() noexcept { return data_ + size_; }
  const T* begin() const noexcept { return data_; }
  const T* end() const noexcept { return data_ + size_; }
  T& operator[](std::size_t i) noexcept { return data_[i]; }
  const T& operator[](std::size_t i) const noexcept { return data_[i]; }
  T& back() noexcept { return data_[size_ - 1]; }
  operator std::span<T>() noexcept { return {data_, size_}; }
  operator std::span<const T>() const noexcept { return {data_, size_}; }

 private:
  T* local() noexcept { return std::launder(reinterpret_cast<T*>(buffer_)); }
  bool on_heap() const noexcept { return capacity_ != N; }
  void assign(const T* items, std::size_t n) {
    reserve(n);
    std::uninitialized_copy_n(items, n, data_);
    size_ = n;
  }
  void take(InlineVec& other) noexcept {
    if (other.on_heap()) {
      data_ = std::exchange(other.data_, other.local());
      capacity_ = std::exchange(other.capacity_, N);
      size_ = std::exchange(other.size_, 0);
    } else {
      data_ = local();
      capacity_ = N;
      std::uninitialized_move_n(other.data_, other.size_, data_);
      size_ = other.size_;
      other.clear();
    }
  }
  void grow(std::size_t least) {
    const std::size_t capacity = std::max(least, capacity_ * 2);
    T* bigger = std::allocator<T>{}.allocate(capacity);
    std::uninitialized_move_n(data_, size_, bigger);
    std::destroy_n(data_, size_);
    free_heap();
    data_ = bigger;
    capacity_ = capacity;
  }
  void free_heap() noexcept {
    if (on_heap()) std::allocator<T>{}.deallocate(data_, capacity_);
    data_ = local();
    capacity_ = N;
  }

  alignas(T) std::byte buffer_[sizeof(T) * N];
  T* data_ = local();
  std::size_t size_ = 0;
  std::size_t capacity_ = N;
};

}  // namespace sherd
