#include "runtime/storage.h"

#include <algorithm>

#include "runtime/backend.h"
#include "runtime/context.h"

namespace sherd {

StorageOwner::~StorageOwner() = default;
void StorageOwner::before_write(Storage&) {}
void StorageOwner::expect_reads(Storage&, int) {}
void StorageOwner::read_done(Storage&) {}
void StorageOwner::forget_reads(Storage&) noexcept {}
std::string StorageOwner::explain_released() const { return {}; }
bool StorageOwner::releases() const { return true; }
void StorageOwner::storage_gone(Storage&) noexcept {}

void* RefCounted::operator new(std::size_t bytes) { return Context::current().cpu_pool().allocate(bytes); }
void RefCounted::operator delete(void* data, std::size_t bytes) noexcept { CpuPool::give_back(data, bytes); }

struct Storage::Foreign {
  Foreign(std::function<void()> on_free, Ref<Storage> memory)
      : on_free(std::move(on_free)), memory(std::move(memory)) {}
  Foreign(const Foreign&) = delete;  // `on_free` runs once
  Foreign& operator=(const Foreign&) = delete;
  std::function<void()> on_free;
  Ref<Storage> memory;
  ~Foreign() {
    if (on_free) on_free();
  }
};

Storage::Storage(Device device, std::size_t bytes) : device_(device), bytes_(bytes) {
  Context& context = Context::current();
  use_ = context.memory_use();
  ledger_ = &context.memory();
}

inline void Storage::count(std::int64_t bytes) noexcept {
  Context* context = Context::current_or_null();
  ledger_->add(device_.type, use_, bytes, context != nullptr && &context->memory() == ledger_);
}

Ref<Storage> Storage::allocate(Device device, std::size_t bytes) {
  Ref<Storage> storage(new Storage(device, bytes));
  storage->take_memory();
  return storage;
}

Ref<Storage> Storage::released(Device device, std::size_t bytes, std::shared_ptr<StorageOwner> owner) {
  Ref<Storage> storage(new Storage(device, bytes));
  storage->set_owner(std::move(owner));
  return storage;
}

Ref<Storage> Storage::wrap(Device device, void* data, std::size_t bytes, std::function<void()> on_free) {
  static std::byte nothing;  // an address for empty memory, so that null keeps meaning "released"
  Ref<Storage> storage(new Storage(device, bytes));
  storage->data_ = data != nullptr ? data : &nothing;
  storage->foreign_ = std::make_unique<Foreign>(std::move(on_free), Ref<Storage>());
  return storage;
}

Storage::~Storage() {
  if (owner_) owner_->storage_gone(*this);
  if (const std::uint64_t id = id_.load(std::memory_order_relaxed); id != 0) [[unlikely]] {
    if (const Context* context = Context::current_or_null())
      for (Listener* listener : context->listeners()) listener->storage_gone(id);
  }
  free_memory();
}

void Storage::take_memory() {
  if (device_.type == DeviceType::meta) return;
  capacity_ = device_.is_cpu() ? bytes_ : std::max<std::size_t>(bytes_, 1);
  if (device_.is_cpu()) {
    data_.store(Context::current().cpu_pool().allocate(capacity_), std::memory_order_release);
  } else {
    try {
      data_.store(backend(device_.type).allocate(device_, capacity_), std::memory_order_release);
    } catch (const OutOfMemoryError& error) {
      fail<OutOfMemoryError>("{}; tensors of this rank hold {}", error.what(),
                             Context::current().memory().held(device_.type).text());
    }
  }
  count(static_cast<std::int64_t>(capacity_));
}

void Storage::set_use(MemoryUse use) noexcept {
  const bool counted = data_.load(std::memory_order_relaxed) != nullptr && !foreign_;
  if (counted) count(-static_cast<std::int64_t>(capacity_));
  use_ = use;
  if (counted) count(static_cast<std::int64_t>(capacity_));
}

void Storage::lend(const std::shared_ptr<MemoryLoan>& loan) {
  if (!loans_) loans_ = std::make_unique<std::vector<std::shared_ptr<MemoryLoan>>>();
  if (std::ranges::find(*loans_, loan) == loans_->end()) loans_->push_back(loan);
}

Ref<Storage> Storage::provider() const { return foreign_ ? foreign_->memory : Ref<Storage>(); }

void Storage::free_memory() noexcept {
  if (loans_) [[unlikely]] {
    for (const std::shared_ptr<MemoryLoan>& loan : *loans_) loan->before_free(device_);
    loans_.reset();
  }
  void* data = data_.exchange(nullptr);
  if (foreign_) {
    foreign_.reset();
  } else if (data != nullptr) {
    count(-static_cast<std::int64_t>(capacity_));
    if (!device_.is_cpu())
      backend(device_.type).deallocate(device_, data, capacity_);
    else
      CpuPool::give_back(data, capacity_);
  }
}

void Storage::release() {
  check<StateError>(
      owned(), "storage: release needs an owner that can bring the {} bytes back; set_owner first", bytes_);
  check<StateError>(pins() == 0, "storage: release while {} ops are reading its {} bytes; wait for them",
                    pins(), bytes_);
  free_memory();
}

void Storage::provide() {
  check<StateError>(!resident(), "storage: provide called while its {} bytes are resident; release first",
                    bytes_);
  take_memory();
}

void Storage::provide(Ref<Storage> memory) {
  check<StateError>(!resident(), "storage: provide called while its {} bytes are resident; release first",
                    bytes_);
  if (memory->device() != device_) [[unlikely]]
    fail<DeviceError>("storage: memory for {} is on {}", to_string(device_), to_string(memory->device()));
  check<ValueError>(memory->bytes() >= bytes_, "storage: {} bytes provided where {} are needed",
                    memory->bytes(), bytes_);
  void* data = memory->data();
  foreign_ = std::make_unique<Foreign>(nullptr, std::move(memory));
  data_.store(data, std::memory_order_release);
}

std::uint64_t Storage::id() const {
  static std::atomic<std::uint64_t> next{1};  // a counter that only makes ids unique; it decides nothing
  std::uint64_t id = id_.load(std::memory_order_relaxed);
  if (id == 0) {
    std::uint64_t fresh = next.fetch_add(1, std::memory_order_relaxed);
    id = id_.compare_exchange_strong(id, fresh) ? fresh : id;
  }
  return id;
}

void Storage::refuse_data() const {
  if (device_.type == DeviceType::meta)
    fail<DeviceError>(
        "tensor: a tensor on meta has a shape but no values; make it on another device, or give its "
        "module values with materialize()");
  const std::string of_owner = owner_ != nullptr ? owner_->explain_released() : "";
  check<StateError>(of_owner.empty(), "tensor: {}", of_owner);
  fail<StateError>(
      "tensor: its {} bytes are released and a host read never brings them back; use it in an op, which "
      "does",
      bytes_);
}

}  // namespace sherd
