// A block of memory that knows whether it is here, who can bring it back, and who is reading it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/ref.h"

namespace sherd {

class Storage;

/// Brings released storages back. A sharded group gathers; a recomputation region runs its ops again.
class SHERD_API StorageOwner {
 public:
  virtual ~StorageOwner();
  /// Makes `storage` resident (with `Storage::provide`) or throws.
  virtual void need(Storage& storage) = 0;
  /// A backward is about to read `storage` in `reads` more nodes.
  virtual void expect_reads(Storage& storage, int reads);
  /// One of the expected reads is over.
  virtual void read_done(Storage& storage);
  /// The backward that announced reads ended early; forget the rest.
  virtual void forget_reads(Storage& storage) noexcept;
  /// An op is about to write `storage`.
  virtual void before_write(Storage& storage);
  /// The last handle on `storage` is gone; the owner must forget its address.
  virtual void storage_gone(Storage& storage) noexcept;
};

/// Bytes on a device, shared by every view of them. Released storage keeps its identity: it may come back at
/// another address.
class SHERD_API Storage final : public RefCounted {
 public:
  /// Uninitialised memory; on `meta`, bytes that are only counted.
  static Ref<Storage> allocate(Device device, std::size_t bytes);
  /// Memory of the caller's; `on_free` runs when the last handle goes.
  static Ref<Storage> wrap(Device device, void* data, std::size_t bytes, std::function<void()> on_free = {});
  /// An identity whose memory `owner` brings when it is needed.
  static Ref<Storage> released(Device device, std::size_t bytes, std::shared_ptr<StorageOwner> owner);
  ~Storage() override;

  Device device() const { return device_; }
  std::size_t bytes() const { return bytes_; }
  bool resident() const {
    return data_.load(std::memory_order_acquire) != nullptr || device_.type == DeviceType::meta;
  }
  /// The address; throws StateError while released. Never gathers.
  void* data() const {
    void* p = data_.load(std::memory_order_relaxed);
    if (p == nullptr) [[unlikely]]
      refuse_data();
    return p;
  }

  /// Gives the memory back and keeps the identity. Needs an owner; throws StateError while pinned.
  void release();
  /// Fresh uninitialised memory for a released storage; views become valid again. The owner fills it.
  void provide();
  /// Takes over `memory`'s bytes (same device, at least as many bytes) instead of allocating.
  void provide(Ref<Storage> memory);

  void set_owner(std::shared_ptr<StorageOwner> owner) { owner_ = std::move(owner); }
  const std::shared_ptr<StorageOwner>& owner() const { return owner_; }
  /// A storage without an owner is plain: always resident, and pins cost nothing.
  bool owned() const { return owner_ != nullptr; }
  void pin() { pins_.fetch_add(1, std::memory_order_relaxed); }
  void unpin() { pins_.fetch_sub(1, std::memory_order_relaxed); }
  int pins() const { return pins_.load(std::memory_order_relaxed); }

  /// Counts writes. Gathering and releasing are not writes.
  std::uint32_t version() const { return version_.load(std::memory_order_relaxed); }
  void bump_version() { version_.fetch_add(1, std::memory_order_relaxed); }
  /// Version at the last write that a tape recorded; older views of this storage no longer tell its history.
  std::uint32_t recorded_version() const { return recorded_version_; }
  void mark_recorded() { recorded_version_ = version(); }
  /// Living tensors in this memory that a tape knows how they were computed. A write that the tape does not
  /// record would make what it knows wrong.
  int histories() const { return histories_.load(std::memory_order_relaxed); }
  void add_history() { histories_.fetch_add(1, std::memory_order_relaxed); }
  void drop_history() { histories_.fetch_sub(1, std::memory_order_relaxed); }

  /// Unique in the process, also after this storage is gone and its address is used again. Given on first
  /// request.
  std::uint64_t id() const;

 private:
  Storage(Device device, std::size_t bytes);
  void take_memory();
  void free_memory() noexcept;
  [[noreturn]] void refuse_data() const;

  struct Foreign;  // memory that is not from an allocator: a caller's, or another storage's
  std::atomic<void*> data_{nullptr};
  Device device_;
  std::atomic<int> pins_{0};
  std::atomic<std::uint32_t> version_{0};
  std::uint32_t recorded_version_ = 0;
  std::atomic<int> histories_{0};
  std::size_t bytes_;
  std::size_t capacity_ = 0;
  mutable std::atomic<std::uint64_t> id_{0};
  std::shared_ptr<StorageOwner> owner_;
  std::unique_ptr<Foreign> foreign_;
};

}  // namespace sherd
