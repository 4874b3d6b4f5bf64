#include "tests/late_device.h"

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>

#include "collectives/combine.h"
#include "runtime/backend.h"
#include "runtime/context.h"
#include "runtime/ops/elementwise_list.h"
#include "runtime/ops/list.h"

namespace sherd::test {
namespace {

/// Work in order, done by a thread.
class Queue {
 public:
  Queue() : worker_([this] { work(); }) {
    const std::scoped_lock lock(all_mutex_);
    all_.insert(this);
  }
  ~Queue() {
    {
      const std::scoped_lock lock(all_mutex_);
      all_.erase(this);
    }
    give({});
    worker_.join();
  }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  /// An empty task is the last.
  void give(std::function<void()> task) {
    const std::scoped_lock lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  /// Waits for all tasks of all queues.
  static void idle() {
    const std::scoped_lock lock(all_mutex_);
    for (Queue* queue : all_) queue->wait();
  }
  /// Waits for all tasks; throws what one of them threw.
  void synchronize() {
    wait();
    const std::scoped_lock lock(mutex_);
    if (failure_) throw std::runtime_error(*std::exchange(failure_, std::nullopt));
  }

 private:
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return tasks_.empty(); });
  }
  void work() {
    std::minstd_rand dawdle(seed_++);
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !tasks_.empty(); });
        task = tasks_.front();
      }
      if (!task) return;
      if (dawdle() % 4 == 0)
        for (auto turns = dawdle() % 16; turns > 0; --turns) std::this_thread::yield();
      std::optional<std::string> failure;
      try {
        task();
      } catch (const std::exception& e) {
        failure = e.what();
      }
      task = {};
      const std::scoped_lock lock(mutex_);
      if (failure && !failure_) failure_ = failure;
      tasks_.pop_front();
      changed_.notify_all();
    }
  }

  static inline std::atomic<unsigned> seed_{1};
  static inline std::mutex all_mutex_;
  static inline std::set<Queue*> all_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::optional<std::string> failure_;
  std::thread worker_;
};

/// A count that tasks raise and others wait for. Tasks hold it, so that it may be dropped while they are to
/// come.
struct Moment {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t set = 0, reached = 0;

  static void mark(const std::shared_ptr<Moment>& moment, Queue& queue) {
    std::uint64_t mine;
    {
      const std::scoped_lock lock(moment->mutex);
      mine = ++moment->set;
    }
    queue.give([moment, mine] {
      const std::scoped_lock lock(moment->mutex);
      moment->reached = std::max(moment->reached, mine);
      moment->changed.notify_all();
    });
  }
  std::uint64_t latest() {
    const std::scoped_lock lock(mutex);
    return set;
  }
  void wait_for(std::uint64_t mark) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return reached >= mark; });
  }
  static void follow(const std::shared_ptr<Moment>& moment, Queue& queue) {
    queue.give([moment, mark = moment->latest()] { moment->wait_for(mark); });
  }
};

struct LateEvent final : DeviceEvent {
  std::shared_ptr<Moment> moment = std::make_shared<Moment>();
  void wait() override { moment->wait_for(moment->latest()); }
};
const std::shared_ptr<Moment>& moment_of(DeviceEvent& event) {
  return dynamic_cast<LateEvent&>(event).moment;
}

class LateMark final : public DeviceMark {
 public:
  explicit LateMark(Queue& queue) : moment_(std::make_shared<Moment>()) { Moment::mark(moment_, queue); }
  bool reached() override {
    const std::scoped_lock lock(moment_->mutex);
    return moment_->reached > 0;
  }
  void wait() override { moment_->wait_for(1); }
  double seconds_since(const DeviceMark&) const override { return 0; }
  void read(void* to, const void* from, std::size_t bytes) override {
    wait();
    std::memcpy(to, from, bytes);
  }

 private:
  std::shared_ptr<Moment> moment_;
};

class LatePeerQueue final : public PeerQueue {
 public:
  LatePeerQueue(Queue*& work, Queue*& frees) : work_(work), frees_in_(frees) {}
  std::unique_ptr<DeviceEvent> make_event() override { return std::make_unique<LateEvent>(); }
  void mark_work(DeviceEvent& event) override { Moment::mark(moment_of(event), *work_); }
  void mark(DeviceEvent& event) override { Moment::mark(moment_of(event), moves_); }
  void follow(DeviceEvent& event) override { Moment::follow(moment_of(event), moves_); }
  void work_follows(DeviceEvent& event) override { Moment::follow(moment_of(event), *work_); }
  void copy(std::span<const PeerCopy> copies) override {
    for (const PeerCopy& c : copies) moves_.give([c] { std::memcpy(c.to, c.from, c.bytes); });
  }
  void combine(DType dtype, ReduceOp reduction, std::span<const PeerCombination> combinations) override {
    for (const PeerCombination& c : combinations)
      moves_.give([dtype, reduction, sources = std::vector(c.sources.begin(), c.sources.end()), out = c.out,
                   count = c.count] { sherd::combine(dtype, reduction, sources, out, count); });
  }
  void free_after(std::span<DeviceEvent* const> events, const std::function<void()>& drop) override {
    LateEvent so_far;
    mark_work(so_far);
    Moment::follow(so_far.moment, frees_);
    for (DeviceEvent* event : events) Moment::follow(moment_of(*event), frees_);
    frees_in_ = &frees_;
    drop();
    frees_in_ = nullptr;
  }

 private:
  Queue*& work_;
  Queue*& frees_in_;
  Queue moves_, frees_;
};

/// A rank's queues on one device.
struct Rank {
  Queue own, beside;
  Queue* work = &own;      ///< `beside` in a scope aside
  Queue* frees = nullptr;  ///< where memory is freed, if not in `work`
  LatePeerQueue peers{work, frees};
  void synchronize() {
    beside.synchronize();
    own.synchronize();
  }
  ~Rank() {
    try {
      synchronize();
    } catch (const std::exception&) {  // nobody asked for what failed
    }
  }
};
struct Ranks {
  std::map<int, Rank> of;
};
Rank& rank_of(Device device) { return Context::current().slot<Ranks>().of[device.index]; }

void overwrite_and_free(void* data, std::size_t bytes) {
  std::memset(data, 0xdb, bytes);
  std::free(data);
}

class LateAside final : public DeviceAside {
 public:
  explicit LateAside(Rank& rank) : rank_(rank) {
    const auto so_far = std::make_shared<Moment>();
    Moment::mark(so_far, rank.own);
    Moment::follow(so_far, rank.beside);
    rank.work = &rank.beside;
  }
  ~LateAside() override { rank_.work = &rank_.own; }

 private:
  Rank& rank_;
};

class LateBackend final : public Backend {
 public:
  void* allocate(Device device, std::size_t bytes) override {
    (void)rank_of(device);
    return std::aligned_alloc(64, (bytes / 64 + 1) * 64);
  }
  void deallocate(Device device, void* data, std::size_t bytes) noexcept override {
    if (Context::current_or_null() == nullptr) {  // of a thread that is ending
      Queue::idle();
      return overwrite_and_free(data, bytes);
    }
    Rank& rank = rank_of(device);
    (rank.frees != nullptr ? *rank.frees : *rank.work).give([data, bytes] {
      overwrite_and_free(data, bytes);
    });
  }
  void copy(void* to, Device to_device, const void* from, Device from_device, std::size_t bytes) override {
    Rank& rank = rank_of(to_device.is_cpu() ? from_device : to_device);
    if (from_device.is_cpu()) {
      const auto* begin = static_cast<const std::byte*>(from);
      rank.work->give([to, values = std::vector(begin, begin + bytes)] {
        std::memcpy(to, values.data(), values.size());
      });
      return;
    }
    if (!to_device.is_cpu() && to_device != from_device) synchronize(from_device);
    rank.work->give([to, from, bytes] { std::memcpy(to, from, bytes); });
    if (to_device.is_cpu() || to_device != from_device) rank.work->synchronize();
  }
  void synchronize(Device device) override { rank_of(device).synchronize(); }
  std::unique_ptr<DeviceMark> mark(Device device) override {
    return std::make_unique<LateMark>(*rank_of(device).work);
  }
  void synchronize_all() override {
    for (auto& [index, rank] : Context::current().slot<Ranks>().of) rank.synchronize();
  }
  std::unique_ptr<DeviceAside> aside(Device device) override {
    return std::make_unique<LateAside>(rank_of(device));
  }
  PeerQueue* peer_queue(Device device) override { return &rank_of(device).peers; }
};

/// The tensor's memory as it is now, as a tensor of the host that keeps nothing alive.
Tensor on_host(const Tensor& t) {
  if (!t.defined() || t.device().is_cpu()) return t;
  const Storage& storage = t.storage();
  Ref<Storage> memory = Storage::wrap(Device::cpu(), storage.data(), storage.bytes());
  return Tensor(make_ref<TensorImpl>(std::move(memory), sherd::Layout(t.layout()), t.dtype()));
}

template <class O>
void run_later(const void* op, Inputs in, Outputs out) {
  std::vector<Tensor> inputs, outputs;
  const auto late = [](const Tensor& t) { return t.defined() && !t.device().is_cpu(); };
  std::optional<Device> device;
  for (const Tensor& t : in) {
    if (late(t)) device = t.device();
    inputs.push_back(on_host(t));
  }
  for (const Tensor& t : out) {
    if (late(t)) device = t.device();
    outputs.push_back(on_host(t));
  }
  rank_of(*device).work->give([op = *static_cast<const O*>(op), inputs, outputs]() mutable {
    kernel_row<O>().on(DeviceType::cpu)(&op, inputs, outputs);
  });
}

}  // namespace

Device late_device(int index) {
  static LateBackend instance;
  static const DeviceType type = [] {
    const DeviceType made = register_backend("late", instance);
    backend(DeviceType::cpu);
    const auto share = [&]<class O>() {
      if (kernel_row<O>().on(DeviceType::cpu) != nullptr) kernel_row<O>().set(made, &run_later<O>);
    };
    ops::for_each_structural(share);
    ops::UnaryOps::for_each(share);
    ops::ArithmeticOps::for_each(share);
    ops::ComparisonOps::for_each(share);
    share.operator()<ops::Where>();
    return made;
  }();
  return {type, static_cast<std::int8_t>(index)};
}

}  // namespace sherd::test
