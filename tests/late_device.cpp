#include "tests/late_device.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
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
#include "runtime/device_recording.h"
#include "runtime/ops/elementwise_list.h"
#include "runtime/ops/list.h"
#include "runtime/replay.h"
#include "runtime/waiting.h"
#include "tests/last_first.h"

namespace sherd::test {
namespace {

/// Sleeps until `over()`, which `lock` guards and `changed` tells of, and goes on with the rank's other work
/// meanwhile: whoever spins takes a core from the ranks and devices that it waits for.
template <class Over>
void wait_until(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, const Over& over) {
  while (works_while_waiting() && !over()) {
    lock.unlock();
    work_while_waiting();
    lock.lock();
    changed.wait_for(lock, std::chrono::microseconds(100), over);
  }
  changed.wait(lock, over);
}

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
    if (tasks_.size() == 1) changed_.notify_all();  // else the worker is at it
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
    wait_until(changed_, lock, [&] { return tasks_.empty(); });
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
      if (dawdle() % 16 == 0)
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
      if (tasks_.empty()) changed_.notify_all();
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
  bool is_reached(std::uint64_t mark) {
    const std::scoped_lock lock(mutex);
    return reached >= mark;
  }
  void wait_for(std::uint64_t mark) {
    std::unique_lock lock(mutex);
    wait_until(changed, lock, [&] { return reached >= mark; });
  }
  static void follow(const std::shared_ptr<Moment>& moment, Queue& queue) {
    queue.give([moment, mark = moment->latest()] { moment->wait_for(mark); });
  }
};

struct LateEvent final : DeviceEvent {
  std::shared_ptr<Moment> moment = std::make_shared<Moment>();
  void wait() override { moment->wait_for(moment->latest()); }
  bool reached() override { return moment->is_reached(moment->latest()); }
};
const std::shared_ptr<Moment>& moment_of(DeviceEvent& event) {
  return dynamic_cast<LateEvent&>(event).moment;
}

class LateMark final : public DeviceMark {
 public:
  explicit LateMark(Queue& queue) : moment_(std::make_shared<Moment>()) { Moment::mark(moment_, queue); }
  bool reached() override { return moment_->is_reached(1); }
  void wait() override { moment_->wait_for(1); }
  double seconds_since(const DeviceMark&) const override { return 0; }
  void read(void* to, const void* from, std::size_t bytes) override {
    wait();
    std::memcpy(to, from, bytes);
  }

 private:
  std::shared_ptr<Moment> moment_;
};

/// Work of a recording that waits for the work of other ranks' recordings.
class LateMeeting final : public PeerMeeting, public std::enable_shared_from_this<LateMeeting> {
 public:
  LateMeeting(const MeetingPlan& plan, std::function<void(std::function<void()>)> give)
      : rank_(static_cast<std::size_t>(plan.rank)), give_(std::move(give)) {
    for (std::vector<std::vector<Bytes>>& half : arrived_) half.resize(plan.calls.size());
  }
  void meet(std::span<const std::shared_ptr<PeerMeeting>> all, std::size_t index,
            const MeetingCall& call) override {
    std::vector<std::shared_ptr<LateMeeting>> everyone;
    for (const auto& one : all) everyone.push_back(std::dynamic_pointer_cast<LateMeeting>(one));
    give_([mine = shared_from_this(), everyone, index, call] { mine->run(everyone, index, call); });
  }
  bool over() noexcept override { return true; }
  void give_up() noexcept override {
    note([&] { given_up_ = true; });
  }

 private:
  using Bytes = std::vector<std::byte>;  // all parts from one rank

  void run(const std::vector<std::shared_ptr<LateMeeting>>& all, std::size_t index, const MeetingCall& call) {
    const std::uint64_t half = calls_ / arrived_[0].size() % 2;
    for (std::size_t to = 0; to < all.size(); ++to) {
      Bytes bytes;
      for (const MeetingPart& part : call.parts) {
        if (part.in == nullptr)
          bytes.resize(bytes.size() + part.bytes);
        else
          bytes.insert(bytes.end(), part.in + to * part.in_step, part.in + to * part.in_step + part.bytes);
      }
      const std::scoped_lock lock(all[to]->mutex_);
      std::vector<Bytes>& there = all[to]->arrived_[half][index];
      there.resize(all.size());
      there[rank_] = std::move(bytes);
    }
    note([&] { sent_ = ++calls_; });
    for (const auto& one : all) {
      std::unique_lock lock(of_all_.mutex);
      of_all_.changed.wait(lock, [&] { return one->sent_ >= calls_ || given_up_; });
      if (one->sent_ < calls_) throw std::runtime_error("late: gave up a call among ranks");
    }
    take(arrived_[half][index], call);
  }
  /// Changes what others wait for: they sleep, as devices take no core from ranks.
  template <class F>
  static void note(const F& change) {
    const std::scoped_lock lock(of_all_.mutex);
    change();
    of_all_.changed.notify_all();
  }
  static void take(const std::vector<Bytes>& arrived, const MeetingCall& call) {
    std::size_t at = 0;
    for (const MeetingPart& part : call.parts) {
      std::vector<const std::byte*> sources;
      for (const Bytes& bytes : arrived) sources.push_back(bytes.data() + at);
      at += part.bytes;
      if (part.out == nullptr) continue;
      if (call.reduction) {
        combine(call.dtype, *call.reduction, sources, part.out,
                static_cast<std::int64_t>(part.bytes) / size_of(call.dtype));
        continue;
      }
      for (std::size_t from = 0; from < sources.size(); ++from)
        if (call.root < 0 || call.root == static_cast<int>(from))
          std::memcpy(part.out + from * part.out_step, sources[from], part.bytes);
    }
  }

  const std::size_t rank_;
  const std::function<void(std::function<void()>)> give_;
  std::mutex mutex_;                                          // taken by those who send
  std::array<std::vector<std::vector<Bytes>>, 2> arrived_{};  // by half and call, then by rank
  std::uint64_t calls_ = 0;                                   // the queue's thread alone
  struct OfAll {
    std::mutex mutex;
    std::condition_variable changed;
  };
  static inline OfAll of_all_;
  std::uint64_t sent_ = 0;  // this and the next are guarded by it
  bool given_up_ = false;
};

/// What was given to a device to be done again and again.
struct Recorded {
  Tasks tasks;
  std::map<void*, std::size_t> own;                  ///< memory that the work makes on its way
  std::vector<std::pair<void*, std::size_t>> freed;  ///< memory of before that came back meanwhile
};

class LatePeerQueue final : public PeerQueue {
 public:
  LatePeerQueue(Queue*& work, Queue*& frees, Recorded* const& recorded)
      : work_(work), frees_in_(frees), recorded_(recorded) {}
  std::shared_ptr<PeerMeeting> meeting(const MeetingPlan& plan) override {
    return std::make_shared<LateMeeting>(
        plan, [this](std::function<void()> task) { recorded_->tasks.push_back(std::move(task)); });
  }
  bool reach(Device) override { return true; }
  Queue& moves() { return moves_; }
  std::unique_ptr<DeviceEvent> make_event() override { return std::make_unique<LateEvent>(); }
  void mark_work(DeviceEvent& event) override {
    check<StateError>(recorded_ == nullptr, "late: a recording cannot hold a call among ranks");
    Moment::mark(moment_of(event), *work_);
  }
  void mark(DeviceEvent& event) override { Moment::mark(moment_of(event), moves_); }
  void follow(DeviceEvent& event) override { Moment::follow(moment_of(event), moves_); }
  void work_follows(DeviceEvent& event) override { Moment::follow(moment_of(event), *work_); }
  void copy(std::span<const PeerCopy> copies) override {
    for (const PeerCopy& c : copies) moves_.give([c] { std::memcpy(c.to, c.from, c.bytes); });
  }
  void combine(DType dtype, ReduceOp reduction, std::span<const PeerCombination> combinations,
               std::span<const Device>) override {
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
  Recorded* const& recorded_;
  Queue moves_, frees_;
};

/// A rank's queues on one device.
struct Rank {
  Queue own, beside;
  Queue* work = &own;      ///< `beside` in a scope aside
  Queue* frees = nullptr;  ///< where memory is freed, if not in `work`
  Recorded* recorded = nullptr;
  LatePeerQueue peers{work, frees, recorded};
  void give(std::function<void()> task) {
    if (recorded != nullptr)
      recorded->tasks.push_back(std::move(task));
    else
      work->give(std::move(task));
  }
  void synchronize() {
    check<StateError>(recorded == nullptr, "late: waits, which a recording cannot");
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
  std::map<std::pair<DeviceType, int>, Rank> of;
};
Rank& rank_of(Device device) { return Context::current().slot<Ranks>().of[{device.type, device.index}]; }

void overwrite_and_free(void* data, std::size_t bytes) {
  std::memset(data, 0xdb, bytes);
  std::free(data);
}

/// Its own memory holds nothing when it begins to run.
class LateRecording final : public DeviceRecording {
 public:
  LateRecording(Rank& rank, const WorkInParts& work) : rank_(rank) {
    rank_.recorded = &recorded_;
    try {
      record_last_first(work, recorded_.tasks);
    } catch (...) {
      end();
      free_all(recorded_.own);
      throw;
    }
    end();
  }
  ~LateRecording() override { free_all(recorded_.own); }
  void run(RandomKey) override {
    for (const auto& [data, bytes] : recorded_.own)
      rank_.work->give([data, bytes] { std::memset(data, 0xdb, bytes); });
    for (const auto& task : recorded_.tasks) rank_.work->give(task);
  }

 private:
  void end() {
    rank_.recorded = nullptr;
    free_all(std::exchange(recorded_.freed, {}));
  }
  void free_all(const auto& blocks) {
    for (const auto& [data, bytes] : blocks)
      rank_.work->give([data, bytes] { overwrite_and_free(data, bytes); });
  }
  Rank& rank_;
  Recorded recorded_;
};

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

/// Connections among processes of this machine, which the queue's thread uses.
class LateNetwork final : public DeviceNetwork {
 public:
  LateNetwork(Rank& rank, NetworkOffer own, std::string key, int self, int size)
      : room_(std::move(own.room)),
        key_(std::move(key)),
        self_(self),
        wires_(static_cast<std::size_t>(size)),
        queue_(rank.work, rank.frees, rank.recorded) {
    listener_ = Wire(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const auto [address, length] = address_of(self);
    expect(::bind(listener_.fd, reinterpret_cast<const sockaddr*>(&address), length) == 0 &&
           ::listen(listener_.fd, size) == 0);
  }
  ~LateNetwork() override { abort(); }

  bool ready() override {
    const std::scoped_lock lock(shared_->mutex);
    check<DeviceError>(shared_->failure.empty(), "late network: {}", shared_->failure);
    if (connected_) return true;
    connect();
    return connected_;
  }
  PeerQueue& queue() override { return queue_; }
  void exchange(std::span<const NetworkMessage> messages) override {
    queue_.moves().give([this, all = std::vector(messages.begin(), messages.end())] { move(all); });
  }
  void gather(std::span<const NetworkGather> gathers) override {
    std::vector<NetworkMessage> all;
    for (const NetworkGather& g : gathers)
      for (int rank = 0; rank < static_cast<int>(wires_.size()); ++rank) {
        std::byte* place = g.out + static_cast<std::size_t>(rank) * g.bytes;
        if (rank == self_) {
          if (place != g.in) queue_.moves().give([place, g] { std::memcpy(place, g.in, g.bytes); });
          continue;
        }
        all.push_back({NetworkMessage::Way::send, rank, const_cast<std::byte*>(g.in), g.bytes});
        all.push_back({NetworkMessage::Way::receive, rank, place, g.bytes});
      }
    exchange(all);
  }
  void abort() noexcept override {
    const std::scoped_lock lock(shared_->mutex);
    shared_->aborted = true;
    for (const Wire& wire : wires_)
      if (wire.fd >= 0) ::shutdown(wire.fd, SHUT_RDWR);
  }
  /// Waits for a last byte of every peer, so it ends only where all of them close.
  bool close() override {
    const bool aborted = [&] {
      const std::scoped_lock lock(shared_->mutex);
      return shared_->aborted;
    }();
    if (!closing_) {
      std::vector<NetworkMessage> last;
      for (int rank = 0; rank < static_cast<int>(wires_.size()); ++rank)
        if (rank != self_)
          for (const auto way : {NetworkMessage::Way::send, NetworkMessage::Way::receive})
            last.push_back({way, rank, &last_byte_, 1});
      if (!aborted) exchange(last);
      closing_ = queue_.make_event();
      queue_.mark(*closing_);
    }
    return closing_->reached() && (aborted || ready());
  }

 private:
  struct Wire {
    explicit Wire(int fd = -1) : fd(fd) {}
    Wire(Wire&& other) noexcept : fd(std::exchange(other.fd, -1)) {}
    Wire& operator=(Wire&& other) noexcept {
      std::swap(fd, other.fd);
      return *this;
    }
    ~Wire() {
      if (fd >= 0) ::close(fd);
    }
    int fd;
  };
  struct Shared {
    std::mutex mutex;
    bool aborted = false;
    std::string failure;
  };
  static void expect(bool good) { check<DeviceError>(good, "late network: {}", std::strerror(errno)); }
  std::pair<sockaddr_un, socklen_t> address_of(int rank) const {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string name = fmt::format("sherd-late-{}-{}", key_, rank);
    std::memcpy(address.sun_path + 1, name.data(), name.size());  // after a 0: a name without a file
    return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
  }
  /// To ranks below this one, and from those above.
  void connect() {
    for (int rank = 0; rank < self_; ++rank) {
      Wire& wire = wires_[static_cast<std::size_t>(rank)];
      if (wire.fd >= 0) continue;
      Wire made(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
      const auto [address, length] = address_of(rank);
      if (::connect(made.fd, reinterpret_cast<const sockaddr*>(&address), length) != 0) return;
      expect(::send(made.fd, &self_, sizeof self_, MSG_NOSIGNAL) == sizeof self_);
      wire = std::move(made);
    }
    for (;;) {
      Wire made(::accept4(listener_.fd, nullptr, nullptr, SOCK_CLOEXEC));
      if (made.fd < 0) break;
      int rank = 0;
      expect(::recv(made.fd, &rank, sizeof rank, MSG_WAITALL) == sizeof rank);
      wires_[static_cast<std::size_t>(rank)] = std::move(made);
    }
    for (std::size_t rank = 0; rank < wires_.size(); ++rank)
      if (rank != static_cast<std::size_t>(self_) && wires_[rank].fd < 0) return;
    connected_ = true;
  }
  /// All messages at once, on the queue's thread.
  void move(std::vector<NetworkMessage> all) {
    for (;;) {
      std::vector<pollfd> waits;
      std::set<std::pair<int, NetworkMessage::Way>> first;
      std::vector<NetworkMessage*> next;
      for (NetworkMessage& m : all)
        if (m.bytes > 0 && first.emplace(m.rank, m.way).second) {
          next.push_back(&m);
          waits.push_back({wires_[static_cast<std::size_t>(m.rank)].fd,
                           static_cast<short>(m.way == NetworkMessage::Way::send ? POLLOUT : POLLIN), 0});
        }
      if (next.empty()) return;
      ::poll(waits.data(), waits.size(), 1000);
      for (std::size_t i = 0; i < next.size(); ++i) {
        if (waits[i].revents == 0) continue;
        NetworkMessage& m = *next[i];
        const ssize_t n = m.way == NetworkMessage::Way::send
                              ? ::send(waits[i].fd, m.data, m.bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                              : ::recv(waits[i].fd, m.data, m.bytes, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (n <= 0) return wait_for_abort();
        m.data += n;
        m.bytes -= static_cast<std::size_t>(n);
      }
    }
  }
  /// As a kernel does whose peer is gone.
  void wait_for_abort() {
    for (bool aborted = false; !aborted; std::this_thread::yield()) {
      const std::scoped_lock lock(shared_->mutex);
      aborted = shared_->aborted;
      if (!aborted) shared_->failure = "a peer is gone";
    }
  }

  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  const std::shared_ptr<const void> room_;
  std::string key_;
  int self_;
  bool connected_ = false;
  Wire listener_;
  std::vector<Wire> wires_;
  std::unique_ptr<DeviceEvent> closing_;
  std::byte last_byte_{};
  LatePeerQueue queue_;  // last, so that its thread ends first
};

class LateBackend final : public Backend {
 public:
  explicit LateBackend(bool networks) : networks_(networks) {}
  void* allocate(Device device, std::size_t bytes) override {
    void* const data = std::aligned_alloc(64, (bytes / 64 + 1) * 64);
    if (Recorded* recorded = rank_of(device).recorded) recorded->own.emplace(data, bytes);
    return data;
  }
  void deallocate(Device device, void* data, std::size_t bytes) noexcept override {
    if (Context::current_or_null() == nullptr) {  // of a thread that is ending
      Queue::idle();
      return overwrite_and_free(data, bytes);
    }
    Rank& rank = rank_of(device);
    if (rank.recorded != nullptr) {
      if (!rank.recorded->own.contains(data)) rank.recorded->freed.emplace_back(data, bytes);
      return;
    }
    (rank.frees != nullptr ? *rank.frees : *rank.work).give([data, bytes] {
      overwrite_and_free(data, bytes);
    });
  }
  void copy(void* to, Device to_device, const void* from, Device from_device, std::size_t bytes) override {
    Rank& rank = rank_of(to_device.is_cpu() ? from_device : to_device);
    check<StateError>(rank.recorded == nullptr || to_device == from_device || from_device.is_cpu(),
                      "late: a recording would write the host's memory when it runs");
    if (from_device.is_cpu()) {
      const auto* begin = static_cast<const std::byte*>(from);
      rank.give([to, values = std::vector(begin, begin + bytes)] {
        std::memcpy(to, values.data(), values.size());
      });
      return;
    }
    if (!to_device.is_cpu() && to_device != from_device) synchronize(from_device);
    rank.give([to, from, bytes] { std::memcpy(to, from, bytes); });
    if (to_device.is_cpu() || to_device != from_device) rank.work->synchronize();
  }
  void synchronize(Device device) override { rank_of(device).synchronize(); }
  std::unique_ptr<DeviceMark> mark(Device device) override {
    return std::make_unique<LateMark>(*rank_of(device).work);
  }
  void synchronize_all() override {
    for (auto& [device, rank] : Context::current().slot<Ranks>().of) rank.synchronize();
  }
  std::unique_ptr<DeviceAside> aside(Device device) override {
    return std::make_unique<LateAside>(rank_of(device));
  }
  PeerQueue* peer_queue(Device device) override { return &rank_of(device).peers; }
  std::unique_ptr<DeviceRecording> record(Device device, const WorkInParts& work) override {
    const RandomReplay& replay = random_replay();
    if (replay.end > replay.first.offset) return nullptr;  // ops draw with the keys that they hold
    try {
      return std::make_unique<LateRecording>(rank_of(device), work);
    } catch (const Error&) {
      return nullptr;
    }
  }
  NetworkOffer network_offer(Device, bool first) override {
    NetworkOffer offer;
    NetworkCard& card = offer.card;
    if (!networks_) return offer;
    static std::atomic<int> taken{0};  // few, so that some lines of a program find no room
    std::shared_ptr<std::atomic<int>> room(&taken, [](std::atomic<int>* count) { --*count; });
    card.reaches = ++taken <= 4;
    if (card.reaches) offer.room = std::move(room);
    card.device = static_cast<std::uint64_t>(::getpid());
    static std::atomic<int> made{0};
    if (first) fmt::format_to_n(card.key.data(), card.key.size() - 1, "{}-{}", ::getpid(), ++made);
    return offer;
  }
  std::unique_ptr<DeviceNetwork> connect(Device device, NetworkOffer own, const NetworkCard& first, int rank,
                                         int size) override {
    return std::make_unique<LateNetwork>(rank_of(device), std::move(own), first.key.data(), rank, size);
  }

 private:
  const bool networks_;
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
  rank_of(*device).give([op = *static_cast<const O*>(op), inputs, outputs]() mutable {
    kernel_row<O>().on(DeviceType::cpu)(&op, inputs, outputs);
  });
}

}  // namespace

namespace {
DeviceType add_backend(const char* name, LateBackend& instance) {
  const DeviceType made = register_backend(name, instance);
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
}
}  // namespace

Device late_device(int index) {
  static LateBackend instance(false);
  static const DeviceType type = add_backend("late", instance);
  return {type, static_cast<std::int8_t>(index)};
}

Device late_network_device(int index) {
  static LateBackend instance(true);
  static const DeviceType type = add_backend("late-network", instance);
  return {type, static_cast<std::int8_t>(index)};
}

}  // namespace sherd::test
