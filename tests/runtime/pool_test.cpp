// Memory that crosses threads: what is freed elsewhere, or after its maker ended, is bounded and used again.
#include "runtime/cpu/pool.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <latch>
#include <mutex>
#include <thread>

#include "tests/runtime/harness.h"
#include "tests/sanitizer.h"

using namespace sherd;
using namespace sherd::test;

namespace {

CpuPool& own_pool() { return Context::current().cpu_pool(); }

constexpr bool caches = !address_sanitizer;
constexpr const char* no_cache = "the pool caches nothing in builds with the address sanitizer";

std::int64_t pages_of_process(int column) {
  std::ifstream file("/proc/self/statm");
  std::int64_t pages = 0;
  for (int i = 0; i <= column; ++i) file >> pages;
  return pages;
}
std::int64_t mapped_bytes() { return pages_of_process(0) * getpagesize(); }
std::int64_t resident_bytes() { return pages_of_process(1) * getpagesize(); }

/// Keeps the process to what it has mapped and a little more; false where that cannot be had.
bool limit_memory() {
  const auto room = static_cast<rlim_t>(mapped_bytes() + (16 << 20));
  const rlimit limit{room, room};
  return setrlimit(RLIMIT_AS, &limit) == 0;
}

/// Hands tensors from one thread to another, few at a time.
class Belt {
 public:
  void put(Tensor x) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return items_.size() < 2; });
    items_.push_back(std::move(x));
    changed_.notify_all();
  }
  Tensor take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !items_.empty(); });
    Tensor x = std::move(items_.front());
    items_.pop_front();
    changed_.notify_all();
    return x;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Tensor> items_;
};

/// A thread with free blocks of `bytes` in its pool, which lives while this does.
class Hoarder {
 public:
  explicit Hoarder(std::int64_t bytes)
      : thread_([this, bytes] {
          {
            const Tensor x = empty({bytes}, {DType::u8});
          }
          cached_ = own_pool().cached_bytes();
          ready_.count_down();
          over_.wait();
        }) {
    ready_.wait();
  }
  ~Hoarder() {
    over_.count_down();
    thread_.join();
  }
  std::size_t cached() const { return cached_; }

 private:
  std::latch ready_{1}, over_{1};
  std::size_t cached_ = 0;
  std::thread thread_;
};

/// How a child process with this body ended.
int status_of_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    bool ok = false;
    try {
      ok = body();
    } catch (...) {
    }
    _exit(ok ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

/// Whether the system holds a process to that: emulators of other processors do not.
bool limits_hold() {
  return status_of_child([] {
           if (!limit_memory()) return false;
           constexpr std::size_t more = std::size_t{1} << 30;
           return mmap(nullptr, more, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED;
         }) == 0;
}

const std::vector<std::int64_t> block_sizes{1, 1000, 5000, 65536, 65537, 1 << 20, 9 << 20};

}  // namespace

TEST_CASE("pool: short threads whose tensors others free leave nothing behind") {
  for (std::int64_t bytes : {std::int64_t{1} << 10, std::int64_t{1} << 16, std::int64_t{8} << 20}) {
    const std::int64_t threads = 100, tensors = std::max<std::int64_t>(1, (4 << 20) / bytes);
    const std::size_t cached = own_pool().cached_bytes();
    [[maybe_unused]] const std::int64_t before = resident_bytes();
    for (std::int64_t i = 0; i < threads; ++i) {
      std::vector<Tensor> made(static_cast<std::size_t>(tensors));
      std::thread([&] {
        for (Tensor& x : made) x = full({bytes}, 1, {DType::u8});
      }).join();
    }
    INFO(bytes << " bytes a tensor");
    if (!address_sanitizer)  // it keeps freed memory to itself for a while
      CHECK(resident_bytes() - before < threads * tensors * bytes / 2);
    CHECK(own_pool().cached_bytes() == cached);  // what other threads made is not ours to keep
  }
}

TEST_CASE("pool: what a thread made is used again by it, whoever frees it") {
  if (skip_if(!caches, no_cache)) return;
  for (std::int64_t bytes : block_sizes) {
    Belt belt;
    constexpr int rounds = 300;
    std::uint64_t asked = 0;
    std::size_t kept = 0;
    std::thread producer([&] {
      for (int i = 0; i < rounds; ++i) belt.put(empty({bytes}, {DType::u8}));
      asked = own_pool().system_allocations();
    });
    std::thread consumer([&] {
      own_pool();
      for (int i = 0; i < rounds; ++i) belt.take();
      kept = own_pool().cached_bytes();
    });
    producer.join();
    consumer.join();
    INFO(bytes << " bytes");
    CHECK(asked < 30);  // a handle, a storage and its memory for each of the four that live at once
    CHECK(kept == 0);
  }
}

TEST_CASE("pool: tensors outlive the thread that made them") {
  for (std::int64_t bytes : block_sizes) {
    std::vector<Tensor> made;
    std::thread([&] {
      for (int i = 0; i < 20; ++i) made.push_back(full({bytes}, i, {DType::u8}));
    }).join();
    for (int i = 0; i < 20; ++i) {
      const std::vector<std::uint8_t> values = made[static_cast<std::size_t>(i)].to_vector<std::uint8_t>();
      CHECK(std::count(values.begin(), values.end(), i) == bytes);
    }
    std::thread([&] { made.resize(10); }).join();
    made.clear();
  }
}

TEST_CASE("pool: a thread that never made anything gives back too") {
  if (skip_if(!caches, no_cache)) return;
  own_pool().trim();
  for (std::int64_t bytes : block_sizes) {
    Tensor x = empty({bytes}, {DType::u8});
    const std::size_t before = own_pool().cached_bytes(), capacity = x.storage().bytes();
    bool had_context = true;
    std::thread([&] {
      x = {};
      had_context = Context::current_or_null() != nullptr;
    }).join();
    CHECK(own_pool().cached_bytes() >= before + capacity);
    CHECK_FALSE(had_context);
  }
}

TEST_CASE("pool: threads that free each other's tensors all the time") {
  constexpr std::size_t threads = 4, slots = 64;
  std::array<Tensor, slots> shared;
  std::array<std::mutex, slots> mutexes;
  std::vector<std::thread> running;
  std::atomic<int> wrong{0};
  for (std::size_t t = 0; t < threads; ++t)
    running.emplace_back([&, t] {
      for (std::size_t i = 0; i < 2000; ++i) {
        const std::size_t at = (i * 7919 + t * 31) % slots;
        const double mark = static_cast<double>(i % 200);
        Tensor x = full({block_sizes[i % 5]}, mark, {DType::u8});
        {
          const std::scoped_lock lock(mutexes[at]);
          std::swap(shared[at], x);
        }
        if (x.defined() && x.storage().bytes() != 0) {
          const auto* values = x.data<std::uint8_t>();
          wrong += values[0] != values[x.numel() - 1];
        }
        if (t == 0 && i % 500 == 0) CpuPool::trim_all();
        if (t == 1 && i % 300 == 0) own_pool().trim();
      }
    });
  for (std::thread& thread : running) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("pool: memory that other threads cache can be given back") {
  if (skip_if(!caches, no_cache)) return;
  const Hoarder first(64 << 20), second(16 << 20);
  {
    const Tensor x = empty({32 << 20}, {DType::u8});
  }
  const std::size_t cached = first.cached() + second.cached() + own_pool().cached_bytes();
  CHECK(CpuPool::trim_all() >= (std::size_t{112} << 20));
  CHECK(own_pool().cached_bytes() == 0);
  CHECK(cached >= (std::size_t{112} << 20));
}

TEST_CASE("pool: out of memory, all caches are given back before it is said") {
  if (skip_if(sanitized, "a sanitizer's own memory does not fit under a limit")) return;
  if (skip_if(!limits_hold(), "this system holds no process to RLIMIT_AS")) return;
  constexpr std::int64_t cache = 256 << 20;
  const Hoarder other(cache);
  for (std::int64_t extra : {0, 1}) {
    CHECK(status_of_child([&] {
            own_pool().trim();
            {
              const Tensor mine = empty({cache}, {DType::u8});
            }
            if (!limit_memory()) return false;
            // Neither cache alone is enough, and beyond both there is only the error.
            const std::int64_t wanted = extra == 0 ? cache * 3 / 2 : cache * 3;
            try {
              const Tensor x = empty({wanted}, {DType::u8});
              return extra == 0 && x.numel() == wanted;
            } catch (const OutOfMemoryError&) {
              return extra == 1 && own_pool().cached_bytes() < (1 << 20);
            }
          }) == 0);
  }
}
