// What becomes of memory that MPI may use. By MPI's profiling interface this program knows which memory that
// is, also after MPI_Test failed on demand; its operator delete sees whether it is freed too early.
//
//   mpi_memory NAME      (mpi_test starts it as several processes)
//
// Every rank prints "verdict RANK ok", or what went wrong.
#include <malloc.h>
#include <mpi.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "sherd.h"
#include "tests/ranks.h"

namespace {

using namespace sherd;
using sherd::test::expect;

enum class Use { none, frame_out, frame_in, message_out, message_in };

/// Memory that a request may use until MPI says that it is over.
struct Lent {
  MPI_Request request;
  const char *begin, *end;
  Use use;
  bool overlaps(const char* from, const char* to) const {
    return use != Use::none && begin < to && from < end;
  }
};

/// All of it; the library's requests are numbers of its lines, since those of MPI may be one for many calls.
/// Allocates nothing, since operator delete asks it.
class Ledger {
 public:
  MPI_Request lend(MPI_Request request, const void* data, int count, Use use) {
    const std::scoped_lock lock(mutex_);
    const auto* begin = static_cast<const char*>(data);
    const Lent fresh{request, begin, begin + count, use};
    // Only messages going out may share what they read.
    misused_ += std::ranges::count_if(lent_, [&](const Lent& l) {
      return l.overlaps(fresh.begin, fresh.end) && (l.use != Use::message_out || use != Use::message_out);
    });
    const auto place = std::ranges::find(lent_, Use::none, &Lent::use);
    if (place == lent_.end()) std::abort();
    *place = fresh;
    return number(place - lent_.begin());
  }
  /// What the library knows as `number`.
  Lent& line(MPI_Request number) {
    return lent_[reinterpret_cast<std::uintptr_t>(number) - reinterpret_cast<std::uintptr_t>(this)];
  }
  void give_back(MPI_Request& number) {
    const std::scoped_lock lock(mutex_);
    line(number) = {};
    number = MPI_REQUEST_NULL;
  }
  void give_all_back() {
    const std::scoped_lock lock(mutex_);
    lent_ = {};
  }
  void freed(const void* data, std::size_t bytes) {
    const std::scoped_lock lock(mutex_);
    const auto* begin = static_cast<const char*>(data);
    misused_ += std::ranges::count_if(lent_, [&](const Lent& l) { return l.overlaps(begin, begin + bytes); });
  }
  /// How often memory was lent twice, or freed, that MPI might use.
  long misused() const { return misused_; }
  bool empty() const {
    return std::ranges::all_of(lent_, [](const Lent& l) { return l.use == Use::none; });
  }

 private:
  MPI_Request number(std::ptrdiff_t line) const {
    return reinterpret_cast<MPI_Request>(reinterpret_cast<std::uintptr_t>(this) +
                                         static_cast<std::uintptr_t>(line));
  }

  std::mutex mutex_;
  std::array<Lent, 4096> lent_{};
  std::atomic<long> misused_{0};
} ledger;

Use failing = Use::none;      ///< MPI_Test fails on such requests
int receives_to_refuse = -1;  ///< MPI_Irecv of frames fails after so many, if not -1
std::atomic<long> living_bytes{0};

}  // namespace

void* operator new(std::size_t bytes) {
  void* const data = std::malloc(std::max<std::size_t>(bytes, 1));
  if (data == nullptr) throw std::bad_alloc();
  living_bytes += static_cast<long>(::malloc_usable_size(data));
  return data;
}
void operator delete(void* data) noexcept {
  if (data == nullptr) return;
  const std::size_t bytes = ::malloc_usable_size(data);
  ledger.freed(data, bytes);
  living_bytes -= static_cast<long>(bytes);
  std::free(data);
}
void operator delete(void* data, std::size_t) noexcept { ::operator delete(data); }

extern "C" {

int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request* request) {
  const int code = PMPI_Isend(data, count, type, to, tag, comm, request);
  *request = ledger.lend(*request, data, count, tag == 0 ? Use::frame_out : Use::message_out);
  return code;
}

int MPI_Irecv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm,
              MPI_Request* request) {
  if (tag == 0 && receives_to_refuse >= 0 && receives_to_refuse-- == 0) return MPI_ERR_OTHER;
  const int code = PMPI_Irecv(data, count, type, from, tag, comm, request);
  *request = ledger.lend(*request, data, count, tag == 0 ? Use::frame_in : Use::message_in);
  return code;
}

int MPI_Test(MPI_Request* request, int* flag, MPI_Status* status) {
  Lent& lent = ledger.line(*request);
  if (failing != Use::none && lent.use == failing) return MPI_ERR_OTHER;
  const int code = PMPI_Test(&lent.request, flag, status);
  if (*flag != 0) ledger.give_back(*request);
  return code;
}

int MPI_Wait(MPI_Request* request, MPI_Status* status) {
  const int code = PMPI_Wait(&ledger.line(*request).request, status);
  ledger.give_back(*request);
  return code;
}

int MPI_Cancel(MPI_Request* request) { return PMPI_Cancel(&ledger.line(*request).request); }

int MPI_Finalize() {
  ledger.give_all_back();
  return PMPI_Finalize();
}

}  // extern "C"

namespace {

/// Of memory that operator delete frees when nobody holds it any more.
Tensor blob(std::int64_t numel) {
  auto memory = std::make_shared<std::vector<float>>(static_cast<std::size_t>(numel), 1.0f);
  float* const data = memory->data();
  return from_blob(data, {numel}, f32, [kept = std::move(memory)] {});
}

void make_calls(const Group& group, std::int64_t n) {
  for (int call = 0; call < 20; ++call) {
    group.all_reduce(blob(n));
    group.all_gather(blob(n * group.size()), blob(n));
    group.reduce_scatter(blob(n), blob(n * group.size()));
  }
}

/// Rank 0 is told by MPI_Test, once it has made calls, that something is wrong with such requests.
void test_fails(Use use) {
  for (const std::int64_t n : {3, 20000}) {
    try {
      run_ranks(0, [&](World& world) {
        const Group& group = world.group();
        bool heard = false;
        try {  // who is slow hears in the calls before
          make_calls(group, n);
          if (world.rank() == 0) failing = use;
          make_calls(group, n);
        } catch (const CollectiveError&) {
          heard = true;
        }
        failing = Use::none;
        const bool concerned = n > 3 || use == Use::frame_out || use == Use::frame_in;
        expect(heard == concerned, "{} elements: a fault was {}heard of", n, heard ? "" : "not ");
        if (heard) group.renew();
        make_calls(group, n);
      });
    } catch (const StateError& error) {  // rank 0 can receive nothing more
      expect(use == Use::frame_in, "{}", error.what());
    } catch (const CollectiveError& error) {
      expect(use == Use::frame_in, "{}", error.what());
    }
    failing = Use::none;
    if (use == Use::frame_in) return;
  }
}

void start_fails() {
  receives_to_refuse = 8;
  try {
    run_ranks(0, [](World&) {});
    throw test::RankFailure("nothing was thrown");
  } catch (const StateError&) {
  }
  expect(!ledger.empty(), "no receive was posted before the one that failed");
}

/// Groups that come and go leave nothing, whatever they did.
void dropped_groups() {
  constexpr int warm = 100, groups = 600;
  run_ranks(0, [](World& world) {
    const Group& all = world.group();
    long before = 0;
    for (int i = 0; i < warm + groups; ++i) {
      if (i == warm) before = living_bytes;
      const Group group = i % 2 == 0 ? all.blocks(all.size()) : all.strided(1);
      for (int channel = 0; channel < 3; ++channel) group.barrier({.channel = channel});
      const Tensor x = zeros({3});
      if (group.rank() == 0) (void)group.enqueue({.kind = CollectiveKind::send, .inputs = {x}, .peer = 1});
      if (group.rank() == 1) group.recv(x, 0);
      (void)group.enqueue({.kind = CollectiveKind::all_reduce, .inputs = {x}, .outputs = {x}});
    }
    all.barrier();
    const long grown = (living_bytes - before) / groups;
    expect(grown < 30, "every dropped group leaves {} bytes", grown);
  });
}

const std::map<std::string, void (*)()> scenarios = {
    {"dropped_groups", dropped_groups},
    {"frames_in", [] { test_fails(Use::frame_in); }},
    {"frames_out", [] { test_fails(Use::frame_out); }},
    {"messages_in", [] { test_fails(Use::message_in); }},
    {"messages_out", [] { test_fails(Use::message_out); }},
    {"start", start_fails},
};

}  // namespace

int main(int argc, char** argv) {
  const auto scenario = scenarios.find(argc == 2 ? argv[1] : "");
  if (scenario == scenarios.end()) {
    std::puts("usage: mpi_memory NAME, under mpirun");
    return 2;
  }
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  std::string verdict = "ok";
  std::thread([&] {  // with its end goes all that the rank has
    try {
      scenario->second();
    } catch (const std::exception& error) {
      verdict = error.what();
    }
  })
      .join();
  if (ledger.misused() > 0)
    verdict = fmt::format("{}; memory that MPI may use was used {} times", verdict, ledger.misused());
  std::printf("verdict %s %s\n", rank == nullptr ? "?" : rank, verdict.c_str());
  std::fflush(stdout);
  return verdict == "ok" ? 0 : 1;
}
