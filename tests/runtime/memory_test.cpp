// What a rank's tensors hold, by what for; a pool's limit; and what an error for lack of memory says and
// leaves.
#include "runtime/memory.h"

#include <algorithm>
#include <random>
#include <regex>
#include <thread>

#include "runtime/storage.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr MemoryUse all_uses[] = {MemoryUse::activations, MemoryUse::gradients, MemoryUse::optimizer,
                                  MemoryUse::gathered, MemoryUse::parameters};

HeldMemory held() { return Context::current().memory().held(DeviceType::cpu); }
CpuPool& pool() { return Context::current().cpu_pool(); }

/// A scope in which this thread's pool may have `bytes` more of the system than tensors hold now.
class Limit {
 public:
  explicit Limit(std::size_t bytes) {
    pool().trim();
    pool().set_limit(pool().system_bytes() + bytes);
  }
  ~Limit() { pool().set_limit(CpuPool::no_limit); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;
};

}  // namespace

TEST_CASE("memory: every byte of a storage counts once, for its use, until it is freed, on any thread") {
  std::mt19937 random(1);
  const HeldMemory before = held();
  std::vector<Tensor> living;
  std::array<std::int64_t, memory_uses> expected = before.bytes;
  const auto of = [](MemoryUse use) { return static_cast<std::size_t>(use); };
  std::int64_t most = Context::current().memory().peak(DeviceType::cpu);
  for (int i = 0; i < 400; ++i) {
    const MemoryUse use = all_uses[random() % memory_uses];
    if (random() % 5 != 0 || living.empty()) {
      const MemoryScope scope(use);
      // A size class of its own: 64-byte steps up to 1 KiB.
      living.push_back(empty({static_cast<std::int64_t>(16 * (1 + random() % 16))}));
      expected[of(use)] += living.back().spec().bytes();
      most = std::max(most, held().total());
    }
    const std::size_t at = random() % living.size();
    if (random() % 3 == 0) {  // is for something else from now on
      expected[of(living[at].storage().use())] -= living[at].spec().bytes();
      living[at].storage().set_use(use);
      expected[of(use)] += living[at].spec().bytes();
    }
    if (random() % 3 == 0) {
      expected[of(living[at].storage().use())] -= living[at].spec().bytes();
      Tensor gone = std::move(living[at]);
      living.erase(living.begin() + static_cast<std::ptrdiff_t>(at));
      if (random() % 2 == 0) std::thread([&] { gone = {}; }).join();
    }
    CHECK(held().bytes == expected);
    CHECK(Context::current().memory().peak(DeviceType::cpu) == most);
  }
  living.clear();
  CHECK(held().bytes == before.bytes);
  Context::current().memory().reset_peak(DeviceType::cpu);
  CHECK(Context::current().memory().peak(DeviceType::cpu) == before.total());
}

TEST_CASE("memory: views, wrapped memory and meta hold nothing more") {
  const Tensor base = empty({64});
  const HeldMemory before = held();
  const Tensor part = narrow(base, 0, 3, 5), nowhere = empty({1 << 20}, {f32, Device::meta()});
  std::vector<float> mine(100);
  const Tensor foreign = from_blob(mine.data(), {100}, f32);
  foreign.storage().set_use(MemoryUse::parameters);
  nowhere.storage().set_use(MemoryUse::parameters);
  CHECK(held().bytes == before.bytes);
}

TEST_CASE("memory: a tensor counts for the thread that made it, also when that has ended") {
  const HeldMemory before = held();
  Tensor left;
  std::thread([&] {
    left = empty({1000});
    CHECK(held().total() >= 4000);
  }).join();
  CHECK(held().bytes == before.bytes);
  left = {};
  CHECK(held().bytes == before.bytes);
}

TEST_CASE("memory: sizes in words") {
  CHECK(bytes_text(0) == "0 bytes");
  CHECK(bytes_text(999) == "999 bytes");
  CHECK(bytes_text(1500) == "1.5 kB");
  CHECK(bytes_text(3'000'000) == "3.0 MB");
  CHECK(bytes_text(80'000'000'000) == "80.0 GB");
  HeldMemory some;
  CHECK(some.text() == "0 bytes");
  some.bytes[static_cast<std::size_t>(MemoryUse::parameters)] = 2000;
  some.bytes[static_cast<std::size_t>(MemoryUse::gradients)] = 1000;
  CHECK(some.text() == "3.0 kB: parameters 2.0 kB, gradients 1.0 kB");
}

TEST_CASE("pool: a limit holds for what is in use and what is cached, and what fits goes on") {
  const Limit limit(std::size_t{1} << 20);
  const std::size_t most = pool().limit();
  std::mt19937 random(2);
  int refused = 0;
  std::vector<Tensor> living;
  for (int i = 0; i < 3000; ++i) {
    const std::int64_t numel = 1 << (random() % 17);
    try {
      living.push_back(empty({numel}));
    } catch (const OutOfMemoryError&) {
      ++refused;
      living.clear();
      living.push_back(empty({numel}));  // 512 KiB at most: it fits alone, whatever the cache holds
    }
    CHECK(pool().system_bytes() <= most);
    if (random() % 3 == 0)
      living.erase(living.begin() + static_cast<std::ptrdiff_t>(random() % living.size()));
  }
  CHECK(refused > 0);
}

TEST_CASE("pool: an error for lack of memory says what was asked, what is held and for what, in one line") {
  const Tensor weights = empty({1000});
  weights.storage().set_use(MemoryUse::parameters);
  const Limit limit(std::size_t{1} << 20);
  const MemoryScope scope(MemoryUse::gradients);
  const Tensor gradients = empty({1 << 16});
  const std::string message = message_of<OutOfMemoryError>([&] { empty({1 << 20}); });
  CHECK_THAT(message, ContainsSubstring("cpu: no memory for 4194304 bytes") &&
                          ContainsSubstring(fmt::format("of its limit of {}", pool().limit())) &&
                          ContainsSubstring("gradients 262.1 kB") && ContainsSubstring("parameters 4.") &&
                          ContainsSubstring("smaller batches") && ContainsSubstring("its pool keeps"));
  std::smatch had;
  REQUIRE(std::regex_search(message, had, std::regex("pool has ([0-9]+) of its limit")));
  // The handle of what was asked for was there too.
  CHECK(std::stoull(had[1]) >= pool().system_bytes());
  CHECK(std::stoull(had[1]) <= pool().limit());
  CHECK(message.find('\n') == std::string::npos);
  const Tensor fits = ones({1 << 16});
  CHECK(sum(fits).item() == 1 << 16);
}

TEST_CASE("pool: what the system refuses is said with what tensors hold") {
  const Tensor some = empty({250});
  CHECK_THAT(message_of<OutOfMemoryError>([] { empty({std::int64_t{1} << 44}); }),
             ContainsSubstring("cpu: no memory for 70368744177664 bytes") &&
                 ContainsSubstring("tensors of this rank hold"));
}
