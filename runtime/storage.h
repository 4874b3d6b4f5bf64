// A block of memory on a device. Its owner may release it and bring it back; tensors that view it stay valid
// meanwhile.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/memory.h"
#include "runtime/peer_queue.h"
#include "runtime/ref.h"

namespace sherd {

class Storage;

/// Brings released storages back: a sharded group by an all_gather, a recomputation region by running its ops
/// again. `apply` and backward passes call these functions on the thread of the op; `storage_gone` comes on
/// the thread that drops the last handle.
class SHERD_API StorageOwner {
 public:
  virtual ~StorageOwner();
  /// Makes `storage` resident (with `Storage::provide`) or throws.
  virtual void need(Storage& storage) = 0;
  /// A backward begins that will read `storage` in `reads` nodes more than were announced before; until as
  /// many `read_done` the memory should stay, or be brought again for each.
  virtual void expect_reads(Storage& storage, int reads);
  /// One of the expected reads is over.
  virtual void read_done(Storage& storage);
  /// The backward that announced reads threw: none of those still expected will come.
  virtual void forget_reads(Storage& storage) noexcept;
  /// An op is about to write `storage`. May throw to refuse; nothing is written then.
  virtual void before_write(Storage& storage);
  /// For messages about host reads while it is released: what it holds, and how to see that. Empty: the
  /// message speaks of bytes.
  virtual std::string explain_released() const;
  /// Whether storages are ever released, and may come back at other addresses.
  virtual bool releases() const;
  /// `storage` is being destroyed; the owner must forget its address.
  virtual void storage_gone(Storage& storage) noexcept;
};

/// Bytes on a device, shared by every tensor that views them. "Resident" means that the memory is there;
/// released storage has none, keeps its identity (`id`, versions), and may come back at another address.
class SHERD_API Storage final : public RefCounted {
 public:
  /// Uninitialised memory (OutOfMemoryError, DeviceError); on `meta` no memory, the bytes are only counted.
  static Ref<Storage> allocate(Device device, std::size_t bytes);
  /// The caller's memory. `on_free` runs once, when the last handle goes or the storage is released.
  static Ref<Storage> wrap(Device device, void* data, std::size_t bytes, std::function<void()> on_free = {});
  /// A storage without memory, which `owner` brings when an op needs it.
  static Ref<Storage> released(Device device, std::size_t bytes, std::shared_ptr<StorageOwner> owner);
  ~Storage() override;

  Device device() const { return device_; }
  std::size_t bytes() const { return bytes_; }
  bool resident() const {
    return data_.load(std::memory_order_acquire) != nullptr || device_.type == DeviceType::meta;
  }
  /// The address; throws StateError while released and DeviceError on `meta`. Never brings the memory back.
  void* data() const {
    void* p = data_.load(std::memory_order_relaxed);
    if (p == nullptr) [[unlikely]]
      refuse_data();
    return p;
  }

  /// Gives the memory back and keeps the identity. StateError without an owner, or while pinned.
  void release();
  /// Gives a released storage uninitialised memory, which the owner then fills. StateError while resident.
  void provide();
  /// The same with the bytes of `memory`, which this storage keeps alive. StateError while resident,
  /// DeviceError for another device, ValueError for too few bytes.
  void provide(Ref<Storage> memory);

  /// The storage whose bytes these are, where an owner provided them so; null for bytes of its own.
  Ref<Storage> provider() const;

  /// Whether the memory is not this storage's own: a caller's, or another storage's. Who finds that nobody
  /// else reads a tensor may keep it or write over it only where this is false.
  bool borrowed() const { return foreign_ != nullptr; }

  /// What the memory is for; at first what the context said when the storage was made.
  MemoryUse use() const { return use_; }
  void set_use(MemoryUse use) noexcept;

  void set_owner(std::shared_ptr<StorageOwner> owner) { owner_ = std::move(owner); }
  const std::shared_ptr<StorageOwner>& owner() const { return owner_; }
  /// Storage without an owner is always resident, so `apply` neither asks for it nor pins it.
  bool owned() const { return owner_ != nullptr; }
  /// While pinned, the storage cannot be released: `apply` pins what an op uses until the op has run.
  void pin() { pins_.fetch_add(1, std::memory_order_relaxed); }
  void unpin() { pins_.fetch_sub(1, std::memory_order_release); }
  /// Who reads 0 may free the memory: what the op read and wrote was before.
  int pins() const { return pins_.load(std::memory_order_acquire); }

  /// Peers read or write this memory on its device, as `loan` knows, also after this: whoever frees it asks.
  /// On the thread of the rank that lends; the same loan counts once.
  void lend(const std::shared_ptr<MemoryLoan>& loan);

  /// Number of writes so far: ops and `mutable_data` count, bringing memory back does not. A backward
  /// compares it with what it was when a value was kept.
  std::uint32_t version() const { return version_.load(std::memory_order_relaxed); }
  void bump_version() { version_.fetch_add(1, std::memory_order_relaxed); }
  /// The version after the last write that the tape recorded. A view taken at an earlier version has the
  /// history of the values before that write, so using it throws.
  std::uint32_t recorded_version() const { return recorded_version_; }
  void mark_recorded() { recorded_version_ = version(); }
  /// Number of living tensors in this memory whose computation the tape recorded. While there are any, an
  /// unrecorded write would make their gradients wrong; the tape refuses it.
  int histories() const { return histories_.load(std::memory_order_relaxed); }
  void add_history() { histories_.fetch_add(1, std::memory_order_relaxed); }
  void drop_history() { histories_.fetch_sub(1, std::memory_order_relaxed); }

  /// Unique in the process and never used again, also when the address is. Given at the first call; from then
  /// on listeners on the thread that destroys the storage hear `storage_gone`.
  std::uint64_t id() const;

 private:
  Storage(Device device, std::size_t bytes);
  void take_memory();
  void count(std::int64_t bytes) noexcept;
  void free_memory() noexcept;
  [[noreturn]] void refuse_data() const;

  struct Foreign;  // who owns memory that no allocator gave to this storage: a caller, or another storage
  std::atomic<void*> data_{nullptr};
  Device device_;
  MemoryUse use_;
  std::atomic<int> pins_{0};
  std::atomic<std::uint32_t> version_{0};
  std::uint32_t recorded_version_ = 0;
  std::atomic<int> histories_{0};
  std::size_t bytes_;
  std::size_t capacity_ = 0;
  MemoryLedger* ledger_;  // of the rank that made this object, whose pool has the object's own block
  mutable std::atomic<std::uint64_t> id_{0};
  std::shared_ptr<StorageOwner> owner_;
  std::unique_ptr<Foreign> foreign_;
  std::unique_ptr<std::vector<std::shared_ptr<MemoryLoan>>> loans_;
};

}  // namespace sherd
