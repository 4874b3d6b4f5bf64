#include "runtime/backend.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <chrono>
#include <cstring>
#include <mutex>

#include "runtime/context.h"
#include "runtime/cpu/kernels.h"
#include "runtime/error.h"
#include "runtime/shown.h"

#ifdef SHERD_CUDA
#include "runtime/cuda/backend.h"
#endif

namespace sherd {
namespace {

using Clock = std::chrono::steady_clock;

/// Of a device whose work is done when it is asked for.
class PastMark final : public DeviceMark {
 public:
  explicit PastMark(Backend& backend, Device device) : backend_(backend), device_(device) {}
  bool reached() override { return true; }
  void wait() override {}
  double seconds_since(const DeviceMark& earlier) const override {
    return std::chrono::duration<double>(at_ - dynamic_cast<const PastMark&>(earlier).at_).count();
  }
  void read(void* to, const void* from, std::size_t bytes) override {
    backend_.copy(to, Device::cpu(), from, device_, bytes);
  }

 private:
  Backend& backend_;
  Device device_;
  Clock::time_point at_ = Clock::now();
};

class CpuBackend final : public Backend {
 public:
  CpuBackend() { cpu::add_kernels(); }
  void* allocate(Device, std::size_t bytes) override { return Context::current().cpu_pool().allocate(bytes); }
  void deallocate(Device, void* data, std::size_t bytes) noexcept override {
    CpuPool::give_back(data, bytes);
  }
  void copy(void* to, Device, const void* from, Device, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void synchronize(Device) override {}
};

/// Back ends that applications registered. Entries are never removed; the first `count` are complete.
struct Registered {
  static constexpr std::size_t first = 1 + static_cast<std::size_t>(DeviceType::meta);
  struct Entry {
    std::string name;
    Backend* instance = nullptr;
  };
  std::array<Entry, device_type_limit - first> entries;
  std::atomic<std::size_t> count{0};
  std::mutex adding;

  static Registered& all() {
    static Registered registered;
    return registered;
  }
  const Entry* find(DeviceType type) const {
    const std::size_t i = static_cast<std::size_t>(type) - first;
    return i < count.load(std::memory_order_acquire) ? &entries[i] : nullptr;
  }
};

}  // namespace

Backend::~Backend() = default;
DeviceMark::~DeviceMark() = default;
DeviceEvent::~DeviceEvent() = default;
PeerMeeting::~PeerMeeting() = default;
PeerQueue::~PeerQueue() = default;
DeviceAside::~DeviceAside() = default;
MemoryLoan::~MemoryLoan() = default;
DeviceNetwork::~DeviceNetwork() = default;

std::unique_ptr<DeviceMark> Backend::mark(Device device) {
  synchronize(device);
  return std::make_unique<PastMark>(*this, device);
}

std::unique_ptr<DeviceNetwork> Backend::connect(Device device, NetworkOffer, const NetworkCard&, int, int) {
  fail<NotImplementedError>("{}: its back end connects no devices of several processes", to_string(device));
}

std::string Backend::product(Device) { return {}; }

Backend& backend(DeviceType type) {
  static CpuBackend host;  // stateless
  if (type == DeviceType::cpu) return host;
#ifdef SHERD_CUDA  // whether this build has the back end is asked in this file alone
  if (type == DeviceType::cuda) return cuda_backend();
#endif
  if (type > DeviceType::meta)
    if (const Registered::Entry* entry = Registered::all().find(type)) return *entry->instance;
  fail<DeviceError>("{}: this build has no such back end; build with -Dcuda=enabled, or use cpu",
                    type == DeviceType::cuda ? "cuda" : "meta");
}

void synchronize(Device device) { backend(device.type).synchronize(device); }

void synchronize() {
#ifdef SHERD_CUDA
  cuda_synchronize();
#endif
  const Registered& all = Registered::all();
  for (std::size_t i = 0; i < all.count.load(std::memory_order_acquire); ++i)
    all.entries[i].instance->synchronize_all();
}

int gpu_count() noexcept {
#ifdef SHERD_CUDA
  return cuda_device_count();
#else
  return 0;
#endif
}

DeviceType register_backend(std::string name, Backend& instance) {
  Registered& all = Registered::all();
  const std::scoped_lock lock(all.adding);
  const auto plain = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c == '-'; };
  check<ValueError>(
      !name.empty() && std::ranges::all_of(name, plain),
      "register_backend: '{}' is no name that a device's text can have; use letters, digits, - and _",
      shown(name));
  check<ValueError>(name != "cpu" && name != "cuda" && name != "meta" && !backend_type(name),
                    "register_backend: there is a back end named '{}' already; choose another name", name);
  const std::size_t i = all.count.load(std::memory_order_relaxed);
  check<ValueError>(i < all.entries.size(),
                    "register_backend: '{}' would be number {}, and there is room for {}", name, i + 1,
                    all.entries.size());
  all.entries[i] = {std::move(name), &instance};
  all.count.store(i + 1, std::memory_order_release);
  return static_cast<DeviceType>(Registered::first + i);
}

std::string_view backend_name(DeviceType type) {
  const Registered::Entry* entry = type > DeviceType::meta ? Registered::all().find(type) : nullptr;
  return entry != nullptr ? std::string_view(entry->name) : std::string_view("?");
}

std::optional<DeviceType> backend_type(std::string_view name) {
  const Registered& all = Registered::all();
  for (std::size_t i = 0; i < all.count.load(std::memory_order_acquire); ++i)
    if (all.entries[i].name == name) return static_cast<DeviceType>(Registered::first + i);
  return std::nullopt;
}

}  // namespace sherd
